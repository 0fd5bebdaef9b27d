#!/usr/bin/env bash
# Everything that only a GPU can show, in one go, with the results in a folder.
#
#     benchmarks/gpu.sh OUT --text FILE [--only STAGE,STAGE...]
#     benchmarks/gpu.sh OUT --smoke       # the same stages in small on the CPU, in two minutes: proves this script
#
# FILE is a text from 8 MB on, for which `xlcli train` chooses the preset base on a GPU. PYTHON names the interpreter of an
# environment with xlcli and pytest (default: python3). Stages:
#
#     machine     device, driver, versions
#     tests       tests/gpu: every variant as on the CPU, 16 bits, compiled, deterministic
#     train       preset base for ten minutes; the model stays in OUT/base
#     eval        score and speed of that model by memory length, as `xlcli eval` and `xlcli bench eval`
#     decode      time per token of that model by memory length and number type of weights and memory
#     invariance  its score with different segment lengths, batch sizes and pipes (benchmarks/invariance.py)
#     steps       training steps of base: float32, bfloat16, compiled, activations recomputed
#     variants    training, evaluation and decoding of other presets
#     nccl        training on all devices of the machine by torchrun, and on one, replicated and with runtime.shard
#
# A stage writes OUT/STAGE.log and results beside it, and OUT/STAGE.done when it succeeds; a restarted script skips such
# stages, and the stage train continues its run. Times are in OUT/stages.tsv. A failed stage does not stop the others; the
# exit code is then 1. OUT/results.tar.gz has everything but the models.
set -u

usage() {
  sed -n '2,/^set -u/{/^set -u/d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}

out='' text='' smoke=0 only=''
while [ $# -gt 0 ]; do
  case $1 in
    --smoke) smoke=1 ;;
    --text) [ $# -gt 1 ] || usage; shift; text=$1 ;;
    --only) [ $# -gt 1 ] || usage; shift; only=$1 ;;
    -*) usage ;;
    *) [ -z "$out" ] || usage; out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || usage
home=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
python=${PYTHON:-python3}
. "$home/benchmarks/stages.sh"
export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}"
xlcli() { "$python" -m xlcli "$@"; }

if [ $smoke = 1 ]; then
  device=cpu preset=tiny budget=6s seconds=0.1 mem_lens=0,64 presets=tiny runs='1 2'
  dtypes='float32' selection=(-k '(plain and not 16_bits and not compiled) or full-xl-0 or lsh-sinusoidal-0 or deterministic_run_is')
  [ -n "$text" ] || { cat "$home"/docs/*.md > "$out/text.txt"; text=$out/text.txt; }
else
  [ -r "$text" ] || { echo "gpu.sh: give a text of at least 8 MB: --text FILE" >&2; exit 2; }
  device=cuda preset=base budget=10m seconds=2 mem_lens=0,512,3800 dtypes='float32 bfloat16' selection=()
  presets='base universal-base universal-act-base reformer-small small-local small-performer'
  workers=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
  [ "$workers" -gt 0 ] || { echo "gpu.sh: PyTorch finds no CUDA device; --smoke runs on the CPU" >&2; exit 2; }
  runs="1 $workers"
fi
text=$(cd "$(dirname "$text")" && pwd)/$(basename "$text")
export XLCLI_DEVICE=$device GPU_TESTS_DEVICE=$device
cd "$out" || exit 1

machine() {
  { nvidia-smi || true; } > machine.txt 2>&1
  "$python" -m torch.utils.collect_env >> machine.txt || return 1
  git -C "$home" rev-parse HEAD >> machine.txt 2>&1 || true
}

tests() {
  (cd "$home" && "$python" -m pytest tests/gpu -m 'gpu and not exhaustive' -p no:cacheprovider --durations=15 \
    -o "junit_family=xunit2" --junitxml="$out/tests.xml" ${selection[@]+"${selection[@]}"})
}

train() {
  local how=(--preset $preset --max-time $budget)
  [ -e base/config.json ] && how=(--resume)
  xlcli train "$text" -o base "${how[@]}" -v && cp base/record.json train.json && cp base/metrics.jsonl train.jsonl
}

eval_stage() {
  xlcli eval -m base --limit 1M --sweep-mem-len "$mem_lens" --json > eval.json &&
    xlcli bench eval -m base --mem-len "$mem_lens" --seconds $seconds --json > bench-eval.json
}

decode() {
  local weights memory name
  for weights in float32 bfloat16 int8; do
    for memory in float32 bfloat16 int8; do
      [ $smoke = 1 ] && [ $weights$memory != float32float32 ] && continue
      name=decode-$weights-$memory.json
      [ -s $name ] && continue
      xlcli bench decode -m base --mem-len "$mem_lens" --seconds $seconds --set bench.weight_dtype=$weights \
        --set bench.memory_dtype=$memory --json > $name.part && mv $name.part $name || return 1
    done
  done
  xlcli generate 'The ' -m base -n 64 --seed 1 --json > generate.json
}

invariance() {
  "$python" "$home/benchmarks/invariance.py" "$text" --model "$out/base" --bytes $((smoke ? 500 : 100000)) \
    --mem-len $((smoke ? 32 : 256)) --out "$out/invariance.json"
}

steps() {
  local dtype switch name
  for dtype in $dtypes; do
    for switch in '' runtime.compile train.recompute_activations; do
      [ "$smoke$switch" = 1runtime.compile ] && continue
      name=steps-$dtype${switch:+-$switch}.json
      [ -s "$name" ] && continue
      xlcli bench train --preset $preset --set runtime.dtype=$dtype ${switch:+--set $switch=true} --seconds $seconds --json > "$name.part" &&
        mv "$name.part" "$name" || return 1
    done
  done
}

variants() {
  local task name failed=0
  for task in train eval decode; do
    for name in $presets; do
      [ -s "$task-$name.json" ] && continue
      xlcli bench $task --preset $name --seconds $seconds --json > part && mv part "$task-$name.json" || failed=1
    done
  done
  return $failed
}

nccl() {
  local n shard name
  for n in $runs; do
    for shard in false true; do
      name=nccl-$n$([ $shard = true ] && echo -shard)
      [ -s $name.json ] && continue
      "$python" -m torch.distributed.run --standalone --nproc-per-node $n -m xlcli train "$text" -o $name \
        --preset tiny --max-steps 20 --batch-size 16 --overwrite --json --set runtime.shard=$shard > $name.jsonl || return 1
      cp $name/record.json $name.json
    done
  done
}

stages=()
for name in machine tests train eval decode invariance steps variants nccl; do
  case ",$only," in ,, | *,$name,*) stages+=("$name") ;; esac
done
run_stages ${stages[@]+"${stages[@]}"}
failed=$?
tar -czf results.tar.gz $(ls | grep -E '\.(json|jsonl|log|tsv|txt|xml|done)$' | grep -v '^text.txt$')
exit $failed
