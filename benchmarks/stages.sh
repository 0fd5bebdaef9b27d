# The stages of gpu.sh and bundled.sh: run_stages NAME... calls the function of each name in turn, in the present folder.
# The function of a name that is a command of the shell, such as test, is NAME_stage. A stage writes NAME.log and, when
# it succeeds, NAME.done, with which it is skipped; times are in stages.tsv. A failed stage does not stop the others;
# the exit code is then 1.

run_stages() {
  local name stage code failed=0 started took
  for name; do
    [ -e "$name.done" ] && { echo "$name: done before"; continue; }
    stage=$name
    [ "$(type -t "$name")" = function ] || stage=${name}_stage
    started=$(date +%s.%N)
    echo "$name: started $(date -u +%H:%M:%S)"
    "$stage" > "$name.log" 2>&1
    code=$?
    took=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
    printf '%s\t%s\t%s\n' "$name" "$took" "$code" >> stages.tsv
    if [ $code = 0 ]; then
      touch "$name.done"
      echo "$name: $took s"
    else
      failed=1
      echo "$name: FAILED with code $code after $took s; the end of $PWD/$name.log:"
      tail -n 5 "$name.log"
    fi
  done
  return $failed
}
