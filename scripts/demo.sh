#!/bin/sh
# The tour of make demo: capture a trace, look into it, every policy at ten sizes, a page of results.
#   CAPTURE=yes   install torch, however large, and capture
#   CAPTURE=no    take the captured sample
#   otherwise     capture where torch is there or no CUDA libraries come with it
set -eu
cd "$(dirname "$0")/.."

sh scripts/venv.sh base
capture=yes
case ${CAPTURE:-auto} in
    no) capture= ;;
    yes) sh scripts/venv.sh capture ;;
    auto) sh scripts/venv.sh light capture || capture= ;;
    *) echo "simlab: error: CAPTURE is yes, no or auto, not $CAPTURE" >&2; exit 2 ;;
esac
mkdir -p out

simlab() {
    printf '\n$ simlab %s\n' "$*" >&2
    .venv/bin/python -m simlab "$@"
}

policies=lru,fifo,lfu,lfu-decay,arc,random,stale,mix,mix-tr,mix-trace,opt,opt-bypass
echo "Demo: policies and bounds, 10 sizes, 1 and 4 streams, on real picks of the tiny demo model (so small that its"
echo "figures speak for no other). The first time takes two minutes more, while the policies are compiled."
if [ "$capture" ]; then
    trace=out/capture.parquet
    simlab capture --force --out $trace
else
    echo "Without torch nothing is captured: this is the sample that was. To capture: make demo CAPTURE=yes"
    trace=tiny-demo-model
fi
simlab inspect $trace
simlab replay $trace --policy $policies --slots 5%,10%,15%,20%,25%,30%,40%,50%,60%,75% --concurrency 1,4 \
    --on-decline cpu --out out/demo.parquet >out/demo.txt
simlab report out/demo.parquet --out out/demo.html >/dev/null
printf '\nThe report is here: %s/out/demo.html\nIts figures as a table: %s/out/demo.txt\n' "$PWD" "$PWD"
