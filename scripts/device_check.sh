#!/usr/bin/env bash
# Checks one GPU in at most six minutes, without a network: batch invariance, the handoff between two
# processes (staged through host shared memory), and tokens per second at SmolLM2's shapes.
# Needs torch, transformers, safetensors and pytest; neither Ray nor FastAPI nor gguf.
#
#   scripts/device_check.sh [REPORT.json]        DEVICE=cpu LAYERS=2 tries the script itself without a GPU
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
report=${1:-${OUT:-.}/device_check.json}
device=${DEVICE:-cuda}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

select=(-k "$device")
# No project configuration: it asks for plugins that a bare machine lacks.
timeout 240 "$python" -m pytest -c /dev/null --rootdir . --noconftest -p no:cacheprovider -q \
  tests/gpu "${select[@]}" 2>&1 | tee "$log"
tests=${PIPESTATUS[0]}
speed=$(timeout 110 "$python" -m tests.gpu.device_report --device "$device" --layers "${LAYERS:-30}")
measured=$?
summary=$(tail -n 1 "$log" | tr -d '"')
printf '{"tests_exit_code": %d, "tests": "%s", "speed": %s}\n' "$tests" "$summary" "${speed:-null}" | tee "$report"
[ "$tests" -eq 0 ] && [ "$measured" -eq 0 ]
