#!/bin/sh
# The tour of make demo: what is in the sample trace, every policy at ten sizes, one page of results.
set -eu
cd "$(dirname "$0")/.."
mkdir -p out

simlab() {
    printf '\n$ simlab %s\n' "$*" >&2
    .venv/bin/python -m simlab "$@"
}

echo "Demo: policies and bounds, 10 sizes, 1 and 4 streams, on the sample trace (synthetic, in the shape"
echo "of Qwen3-30B-A3B). No download; two minutes or so the first time, while the policies are compiled."
simlab inspect
simlab replay --policy lru,fifo,lfu,lfu-decay,arc,random,stale,mix,mix-tr,opt,opt-bypass \
    --slots 5%,10%,15%,20%,25%,30%,40%,50%,60%,75% --concurrency 1,4 --on-decline cpu \
    --out out/demo.parquet >out/demo.txt
simlab report out/demo.parquet --out out/demo.html >/dev/null
printf '\nThe report is here: %s/out/demo.html\nIts figures as a table: %s/out/demo.txt\n' "$PWD" "$PWD"
