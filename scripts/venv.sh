#!/bin/sh
# Make .venv beside the Makefile and install simlab into it with the versions of constraints.txt.
#   venv.sh base           what simlab needs to run
#   venv.sh dev            that, and what its tests, checks and benchmarks need
#   venv.sh capture        that of base, and torch and transformers
#   venv.sh dev capture    all
#   venv.sh light capture  as capture, but 3 is returned when that would download gigabytes
# A torch (2.6 or newer) that $PYTHON has is used from where it is. Stamps hold what the environment
# was made from, so a second call returns at once.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

fail() { echo "simlab: error: $*" >&2; exit 1; }

light=
[ "$1" != light ] || { light=yes; shift; }
case $* in
    base) what=. size="210 MB to download, 850 MB on disk" ;;
    dev) what='.[dev]' size="260 MB to download, 1 GB on disk" ;;
    capture) what='.[capture]' torch=yes ;;
    "dev capture") what='.[dev,capture]' torch=yes ;;
    *) fail "venv.sh takes base, dev, capture or dev capture, not $*" ;;
esac
command -v "$python" >/dev/null ||
    fail "there is no $python; install Python 3.11 or newer, or say which: make PYTHON=/path/to/python3"
version=$("$python" -c 'import sys; print(sys.version, sys.base_prefix); sys.exit(sys.version_info < (3, 11))') ||
    fail "$python is Python ${version%% *}, simlab needs 3.11 or newer: make PYTHON=/path/to/python3"

lent= # the folder of a torch that is there already
[ -z "${torch:-}" ] || lent=$("$python" -c '
from importlib import metadata, util
from pathlib import Path
try:
    if tuple(map(int, metadata.version("torch").split(".")[:2])) >= (2, 6):
        print(Path(util.find_spec("torch").origin).parent.parent)
except metadata.PackageNotFoundError:
    pass')
[ -z "$lent" ] || size="250 MB to download, torch is used from $lent"

# the folder is part of the stamp: an environment does not survive being moved
key=$({ pwd; echo "$version"; cat pyproject.toml constraints.txt; } | cksum)
stamp() { echo "$key$([ "$1" != capture ] || echo " $lent")"; }
made_from() { [ -x .venv/bin/python ] && [ "$(cat ".venv/simlab-$1" 2>/dev/null)" = "$2" ]; }
for kind in base "$@"; do made_from "$kind" "$(stamp "$kind")" || missing=yes; done
[ -n "${missing:-}" ] || exit 0

if ! made_from place "$PWD $version"; then
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python cannot make virtual environments; install its venv module (on Debian: apt install python3-venv)"
    [ ! -e .venv ] || [ -f .venv/simlab-place ] ||
        fail "there is a .venv here that this script did not make; move it away and try again"
    rm -rf .venv
    mkdir .venv
    : >.venv/simlab-place # empty until the environment is whole
    "$python" -m venv .venv
    echo "$PWD $version" >.venv/simlab-place
fi

pip() { .venv/bin/python -m pip install -q --disable-pip-version-check -c .venv/simlab-constraints "$@"; }
cp constraints.txt .venv/simlab-constraints
if [ -n "$lent" ]; then
    grep -v '^torch==' constraints.txt >.venv/simlab-constraints
elif [ -n "${torch:-}" ]; then
    echo "Asking pip how large torch is for this machine" >&2
    # on some systems it brings the CUDA libraries along
    size="450 MB to download, 2 GB on disk"
    if pip --dry-run --report - torch 2>/dev/null | grep -Eq '"name": "(nvidia|cuda)'; then
        [ -z "$light" ] || { echo "torch is not here, and pip would get one with CUDA: 3 GB" >&2; exit 3; }
        size="3 GB to download, 7 GB on disk"
    fi
fi
echo "Installing simlab into .venv (once: about $size, one to three minutes)" >&2
for kind in base "$@"; do rm -f ".venv/simlab-$kind"; done
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -z "${torch:-}" ] || echo "$lent" >"$packages/zz-torch.pth" # empty: no torch from elsewhere
# the build backend first, held by the same constraints, instead of one in an environment of its own
{ pip hatchling && pip --no-build-isolation -e "$what"; } ||
    fail "the packages could not be installed (see above); check the network and the disk, then try again"
for kind in base "$@"; do stamp "$kind" >".venv/simlab-$kind"; done
