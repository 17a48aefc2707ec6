#!/bin/sh
# Make .venv beside the Makefile and install simlab into it with the versions of constraints.txt.
#   venv.sh base   what simlab needs to run
#   venv.sh dev    that, and what its tests, checks and benchmarks need
#   venv.sh capture    that, and torch and transformers
# A stamp holds what the environment was made from, so a second call returns at once.
set -eu
cd "$(dirname "$0")/.."
want=$1
python=${PYTHON:-python3}

fail() { echo "simlab: error: $*" >&2; exit 1; }

case $want in
    base) what=. size="210 MB to download, 850 MB on disk" ;;
    dev) what='.[dev]' size="260 MB to download, 1 GB on disk" ;;
    capture) what='.[dev,capture]' size="500 MB to download where torch has a CPU build for pip, 3 GB where it has only a CUDA one" ;;
    *) fail "venv.sh takes base, dev or capture, not $want" ;;
esac
command -v "$python" >/dev/null ||
    fail "there is no $python; install Python 3.11 or newer, or say which: make PYTHON=/path/to/python3"
version=$("$python" -c 'import sys; print(sys.version, sys.base_prefix); sys.exit(sys.version_info < (3, 11))') ||
    fail "$python is Python ${version%% *}, simlab needs 3.11 or newer: make PYTHON=/path/to/python3"

# the folder is part of the stamp: an environment does not survive being moved
key=$({ pwd; echo "$version"; cat pyproject.toml constraints.txt; } | cksum)
made_from() { [ -x .venv/bin/python ] && [ "$(cat ".venv/simlab-$1" 2>/dev/null)" = "$2" ]; }
# what holds more serves for less
for kind in base dev capture; do
    [ "$want" != "$kind" ] || wanted=yes
    [ -z "${wanted:-}" ] || ! made_from "$kind" "$key" || exit 0
done

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
echo "Installing simlab into .venv (once: about $size, one to three minutes)" >&2
rm -f .venv/simlab-base .venv/simlab-dev .venv/simlab-capture
install() { .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "$@"; }
# the build backend first, held by the same constraints, instead of one in an environment of its own
{ install hatchling && install --no-build-isolation -e "$what"; } ||
    fail "the packages could not be installed (see above); check the network and the disk, then try again"
echo "$key" >".venv/simlab-$want"
