#!/bin/sh
# Everything xlcli does, in about four minutes: generate, train, evaluate with and without memory, generate, stream.
set -eu
xlcli=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$2"
mkdir -p "$2"
cd "$2"

show() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
}

show 'xlcli generate "It was a dark night, and" --max-new-tokens 80'
"$xlcli" generate "It was a dark night, and" --max-new-tokens 80
echo

show 'xlcli train shakespeare.txt --max-time 2m'
cp "$here/shakespeare.txt" .
"$xlcli" train shakespeare.txt --max-time 2m

show 'xlcli eval --sweep-mem-len 0,128,512'
"$xlcli" eval --sweep-mem-len 0,128,512

show 'xlcli generate "ROMEO:" --max-new-tokens 80'
"$xlcli" generate "ROMEO:" --max-new-tokens 80
echo

show 'head -12 shakespeare.txt | xlcli stream'
head -12 shakespeare.txt | "$xlcli" stream
