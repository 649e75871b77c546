#!/usr/bin/env bash
# Resolves requirements/*.in into pinned *.txt with uv. The lists are complete and are installed with --no-deps.
set -euo pipefail
cd "$(dirname "$0")"

# Left out of the CPU list: torchvision, torchaudio and torchcodec are CUDA builds on PyPI and break `import transformers`
# beside torch's CPU build; triton makes vLLM choose another model runner; opencv serves images and video, not used here.
left_out='^(torchvision|torchaudio|torchcodec|triton|opencv-python-headless|pip)=='
compile=(uv pip compile --quiet --python-version 3.11 --no-header --no-annotate --index-strategy unsafe-best-match
         --no-emit-index-url --no-emit-find-links)
cpu_index=(--extra-index-url "${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}")

all=$(mktemp)
trap 'rm -f "$all"' EXIT
"${compile[@]}" "${cpu_index[@]}" cpu.in dev.in > "$all"
"${compile[@]}" "${cpu_index[@]}" -c "$all" cpu.in | grep -vE "$left_out" > cpu.txt
grep -vE "$left_out" "$all" | grep -vxFf cpu.txt > dev.txt
"${compile[@]}" -c dev.txt gpu.in dev.in | grep -vxFf dev.txt > gpu.txt
