#!/usr/bin/env bash
# Everything that only a GPU can show, within a given time, with the results in a folder.
#
#     benchmarks/gpu.sh OUT [--minutes N]                    # tests and figures; 9 minutes by default
#     benchmarks/gpu.sh train OUT --ids IDS --valid TEXT --minutes N   # the bundled model trains on
#     benchmarks/gpu.sh [train] OUT --smoke                  # the same in small on the CPU, in two minutes: proves this script
#
# PYTHON names the interpreter of an environment with xlcli and pytest (default: python3). When the time is over, the stage
# that runs is interrupted, and later ones are not begun. Stages of the first form, any of which --only A,B,... selects:
#
#     machine     device, driver, versions
#     commands    train, eval, generate, stream and bench, each once, in small
#     figures     gpu_figures.py: speed and memory of training, generation and evaluation, profiles, rounding, in one process
#     tests       tests/gpu, in a random order: every variant as on the CPU, 16 bits, deterministic; compiled ones last.
#                 GPU_TESTS_SEED gives the order (default: today's date), and tests.txt the largest differences
#     torchrun    training in one process that torchrun starts, which joins by NCCL
#
# Figures and tests get half of the time that is left when they begin.
#
# `train` trains the bundled model on the text of IDS (benchmarks/ids.py) with the options below and those of TRAIN_OPTIONS.
# OUT/model is the model folder; OUT/weights.aa, weights.ab ... are parts of 15 MB of a tar file with its copy in 8 bits.
#
# A stage writes OUT/STAGE.log and results beside it, and OUT/STAGE.done when it succeeds; a restarted script skips such
# stages. Times are in OUT/stages.tsv; OUT/results.tar.gz has all results. The exit code is 1 if a stage failed.
set -u

usage() {
  sed -n '2,/^set -u/{/^set -u/d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}

out='' ids='' valid='' smoke=0 only='' minutes=9 mode=figures
while [ $# -gt 0 ]; do
  case $1 in
    train) mode=train ;;
    --smoke) smoke=1 ;;
    --ids) [ $# -gt 1 ] || usage; shift; ids=$(readlink -f "$1") ;;
    --valid) [ $# -gt 1 ] || usage; shift; valid=$(readlink -f "$1") ;;
    --minutes) [ $# -gt 1 ] || usage; shift; minutes=$1 ;;
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
deadline=$(awk -v s=$SECONDS -v m="$minutes" 'BEGIN { print int(s + 60 * m) }')

# Runs Python until the time is over, and then interrupts it.
within() {
  local left=$((deadline - SECONDS))
  [ $left -gt 0 ] || { echo "the time is over"; return 124; }
  timeout -k 15 -s INT $left "$python" "$@"
}
xlcli() { within -m xlcli "$@"; }

half_of_time() { awk -v s=$((deadline - SECONDS)) 'BEGIN { print s / 120 }'; }

if [ $smoke = 1 ]; then
  device=cpu small=(--small)
  selection=(-k '(plain and not 16_bits and not compiled) or full-xl-0 or deterministic_run_is')
else
  device=cuda small=() selection=()
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { echo "gpu.sh: PyTorch finds no CUDA device; --smoke runs on the CPU" >&2; exit 2; }
  "$python" -c 'import xdist' 2> /dev/null && selection=(-n 12)
fi
export GPU_TESTS_SEED=${GPU_TESTS_SEED:-$(date +%Y%m%d)}
export XLCLI_DEVICE=$device GPU_TESTS_DEVICE=$device
cd "$out" || exit 1

machine() {
  { nvidia-smi || true; } > machine.txt 2>&1
  within -m torch.utils.collect_env >> machine.txt || return 1
  git -C "$home" rev-parse HEAD >> machine.txt 2>&1 || true
}

commands() {
  local text=$home/demo/shakespeare.txt
  head -c 20000 "$text" > little.txt
  xlcli train little.txt -o little --preset tiny --init none --max-steps 20 --batch-size 16 --overwrite --json > train.jsonl &&
    xlcli eval little.txt -m little --json > eval.jsonl && xlcli generate 'ROMEO:' -m little -n 20 --json > generate.jsonl &&
    xlcli stream little.txt -m little --json > stream.jsonl && xlcli bench eval -m little --seconds 0.1 --json > bench.jsonl
}

figures() {
  within "$home/benchmarks/gpu_figures.py" . --device $device --minutes "$(half_of_time)" ${small[@]+"${small[@]}"} &&
    [ -s figures.jsonl ] && ! grep '"error"' figures.jsonl
}

tests() {
  local deadline=$((SECONDS + (deadline - SECONDS) / 2)) code=0
  (cd "$home" && OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 within -m pytest tests/gpu -m 'gpu and not exhaustive' -p no:cacheprovider -p no:benchmark --durations=15 \
    -o "junit_family=xunit2" --junitxml="$out/tests.xml" ${selection[@]+"${selection[@]}"}) || code=$?
  "$python" - tests.xml > tests.txt << 'END'
import sys, xml.etree.ElementTree as tree
found = [(float(p.get("value")), case.get("name")) for case in tree.parse(sys.argv[1]).iter("testcase")
         for p in case.iter("property") if p.get("name") == "difference"]
for difference, name in sorted(found, reverse=True)[:20]:
    print(f"{difference:.1e} {name}")
END
  cat tests.txt
  return $code
}

torchrun() {
  within -m torch.distributed.run --standalone --nproc-per-node 1 -m xlcli train "$home/demo/shakespeare.txt" -o torchrun \
    --preset tiny --init none --max-steps 20 --batch-size 16 --overwrite --json > torchrun.jsonl
}

unpack() {
  if [ $smoke = 1 ]; then
    ids=$out/smoke.ids.xz valid=$home/README.md
    head -c 60000 "$home/demo/shakespeare.txt" > some.txt && within "$home/benchmarks/ids.py" pack some.txt "$ids" || return 1
  fi
  cp "$valid" valid.txt && within "$home/benchmarks/ids.py" unpack "$ids" train.txt
}

fit() {
  local how=(--init books --valid valid.txt --set train.batch_size=128 --set train.lr=0.004 --set train.adam_lr=0.008
    --set train.decay_fraction=0.6 --set train.eval_every=500 --max-time "$(((deadline - SECONDS) - 25))s")
  [ $smoke = 1 ] && how+=(--set train.batch_size=2 --max-steps 3)
  [ -e model/config.json ] && how=(--resume)
  # shellcheck disable=SC2086  # a list of options
  xlcli train train.txt -o model "${how[@]}" ${TRAIN_OPTIONS:-} -v && cp model/record.json fit.json && cp model/metrics.jsonl fit.jsonl
}

pack() {
  "$python" -m xlcli models copy model small --weights int8 && tar -cf - small | split -b 15000000 - weights.
}

stages=()
[ $mode = train ] && names='unpack fit pack' || names='machine commands figures tests torchrun'
for name in $names; do
  case ",$only," in ,, | *,$name,*) stages+=("$name") ;; esac
done
run_stages ${stages[@]+"${stages[@]}"}
failed=$?
tar -czf results.tar.gz $(ls | grep -E '\.(json|jsonl|log|tsv|xml|done)$|^(machine|tests|profile-.*)\.txt$')  # no text of the corpus
exit $failed
