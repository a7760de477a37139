"""Commands, files of SkyPilot and compose files as people write them, for the tests of `serve init`."""

from __future__ import annotations

COMMANDS = {
    "vllm": """HF_TOKEN=hf_secret_of_mine VLLM_LOGGING_LEVEL=DEBUG CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen2.5-7B-Instruct \\
  --tensor-parallel-size=2 --max_model_len 8192 --gpu-memory-utilization 0.92 --enable-auto-tool-choice \\
  --tool-call-parser hermes --served-model-name "qwen 7b" qwen --chat-template-kwargs '{"enable_thinking": false}' \\
  --host localhost --port 8005 --api-key sk-very-secret --disable-log-requests > vllm.log 2>&1""",
    "sglang": """cd ~/sglang && source .venv/bin/activate
export HF_HOME="$HOME/models"
nohup numactl --cpunodebind=0 python -m sglang.launch_server --model-path Qwen/Qwen2.5-14B-Instruct --tp 2 \\
  --mem-fraction-static 0.85 --context-length 32768 --json-model-override-args '{"rope_scaling": null}' --enable-metrics &""",
    "llama.cpp": """docker run -d --rm --gpus '"device=0"' --name llm -p 9090:8080 -v ~/.cache/llama.cpp:/root/.cache/llama.cpp \\
  ghcr.io/ggml-org/llama.cpp:server-cuda -hf bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M --ctx-size 16384 \\
  -ngl 99 -np 4 --jinja --alias 'llama three' --host 127.0.0.1""",
    "tgi": """sudo docker run --gpus all --shm-size 1g -it -e HUGGING_FACE_HUB_TOKEN=$HF_TOKEN --env LOG_LEVEL="info,text=debug" \\
  --publish 127.0.0.1:8080:80 -v $PWD/data:/data --restart=unless-stopped \\
  ghcr.io/huggingface/text-generation-inference:3.3.5 --model-id mistralai/Mistral-7B-Instruct-v0.3 --num-shard 1 \\
  --max-input-tokens 4000 --max-total-tokens 4096 --max-batch-prefill-tokens 4096""",
    "ollama": """OLLAMA_KEEP_ALIVE=24h OLLAMA_HOST=127.0.0.1:11434 ollama run llama3.1:8b""",
}
SKYPILOT = {
    "a vLLM with a policy": """# vLLM on the cheapest of three GPUs
name: vllm.llama_3

envs:
  MODEL: meta-llama/Llama-3.1-8B-Instruct   # the model
secrets:
  HF_TOKEN: null

service:
  readiness_probe:
    path: /v1/chat/completions
    post_data:
      model: $MODEL
      messages: [{role: user, content: Hello}]
      max_tokens: 1
    initial_delay_seconds: 1800
  replica_policy:
    min_replicas: 1
    max_replicas: 4
    target_qps_per_replica: 2.5
    upscale_delay_seconds: 120
    auto_restart: true

resources:
  accelerators: {L4:1, A10G:1, A100:1}
  cpus: 4+
  memory: 16+
  disk_size: 256
  ports: 8081
  job_recovery:
    strategy: FAILOVER
    max_restarts_on_errors: 3

# before the server
setup: |
  uv pip install "vllm==0.9.2"

run: |
  # the server
  vllm serve $MODEL --port 8081 --max-model-len 8192
""",
    "spot in any_of": """service:
  readiness_probe: /health
  replica_policy:
    min_replicas: 2
    max_replicas: 6
    target_qps_per_replica: 5
    dynamic_ondemand_fallback: true
    num_overprovision: 1
    spot_placer: dynamic_fallback
  load_balancing_policy: round_robin
resources:
  ports: 8000
  accelerators: L4
  any_of:
    - job_recovery: none
      infra: aws/us-east-1
      use_spot: true
    - {infra: gcp/us-central1, use_spot: true, job_recovery: EAGER_NEXT_REGION}
    - infra: nebius
      use_spot: true
run: python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen2.5-7B-Instruct --host 0.0.0.0 --port 8000
""",
    "mounts and a bucket": """name: rag
workdir: .
file_mounts:
  /data/prompts:
    source: s3://my-prompts
    mode: MOUNT
resources:
  infra: aws/us-west-2
  instance_type: g6.xlarge
  image_id: docker:vllm/vllm-openai:v0.9.2
  ports: [8000, 9090]
  autostop: {idle_minutes: 10}
  labels: {team: search, cost-center: "0042"}
service:
  readiness_probe: {path: /health, initial_delay_seconds: 1200, timeout_seconds: 10}
  ports: 8000
  replicas: 2
  tls: null
config:
  kubernetes: {provision_timeout: 900}
run: vllm serve BAAI/bge-m3 --port 8000
""",
    "two nodes": """num_nodes: 2
envs: {MODEL: "meta-llama/Llama-3.3-70B-Instruct", ON: on, VERSION: 1.10}
secrets: [HF_TOKEN]
resources:
  accelerators: A100-80GB:2
  infra: gcp
  ports: 8000
  network_tier: best
  priority: 500
service: {readiness_probe: {path: /health, initial_delay_seconds: 3600}, replicas: 1}
run: |
  if [ "$SKYPILOT_NODE_RANK" == "0" ]; then
    ray start --head --port 6379
    vllm serve $MODEL --tensor-parallel-size 2 --pipeline-parallel-size $SKYPILOT_NUM_NODES --port 8000
  else
    ray start --address "$(echo "$SKYPILOT_NODE_IPS" | head -n1):6379" --block
  fi
""",
    "TGI with keys of a newer version": """service:
  readiness_probe: {path: /health, headers: {Authorization: "Bearer $AUTH_TOKEN"}}
  replica_policy: {min_replicas: 0, max_replicas: 2, target_qps_per_replica: 1, downscale_delay_seconds: 300}
secrets:
  AUTH_TOKEN: null
envs: &defaults
  HF_HUB_ENABLE_HF_TRANSFER: 1
resources:
  ordered:
    - {infra: aws, accelerators: A10G:1, use_spot: true}
    - {infra: gcp, accelerators: L4:1}
  ports: 8080
experimental:
  config_overrides: {docker: {run_options: [--shm-size=1g]}}
hooks: {on_stop: "echo bye"}
run: |
  docker run --gpus all --shm-size 1g -p 8080:80 ghcr.io/huggingface/text-generation-inference:3.3.5 \\
    --model-id mistralai/Mistral-7B-Instruct-v0.3
""",
    "ports of a dashboard": """service:
  readiness_probe: {path: /v1/models, initial_delay_seconds: 1200, timeout_seconds: 1200}
  ports: 8000
  replica_policy: {min_replicas: 1, max_replicas: 2, target_qps_per_replica: 0.05, upscale_delay_seconds: 2}
resources: {cloud: local, ports: [8000, 8265], accelerators: MI300X:8}
run: ray start --head --dashboard-port 8265 && vllm serve $MODEL --tensor-parallel-size 8 --port 8000
envs: {MODEL: Qwen/Qwen2.5-72B-Instruct}
""",
    "an image of one's own": """service:
  ports: 8001
  readiness_probe: {path: /health, initial_delay_seconds: 1200, timeout_seconds: 10}
  replica_policy: {min_replicas: 0, max_replicas: 3, target_qps_per_replica: 10, downscale_delay_seconds: 300}
resources:
  accelerators: "L40S:1"
  use_spot: true
  disk_size: 100
  ports: 8001
  any_of:
    - infra: aws/us-east-1
    - infra: gcp
setup: |
  docker pull registry.example/own:1
run: |
  docker run --gpus all --network host --rm registry.example/own:1 serve
""",
}
COMPOSE = {
    "vLLM beside a web page": """name: llm
x-logging: &logging
  logging: {driver: json-file}
  restart: unless-stopped
services:
  vllm:
    <<: *logging
    image: vllm/vllm-openai:${VLLM_TAG:-v0.9.2}
    container_name: vllm
    command: >
      --model ${MODEL:-Qwen/Qwen2.5-14B-Instruct-AWQ} --quantization awq_marlin
      --max-model-len 16384 --served-model-name "qwen 14" --api-key $$NOT_A_VARIABLE
    environment:
      - HUGGING_FACE_HUB_TOKEN=${HF_TOKEN}
      - VLLM_LOGGING_LEVEL=DEBUG
      - NORWAY=no
    ports: ["8001:8000"]
    volumes:
      - ~/.cache/huggingface:/root/.cache/huggingface
      - ./templates:/templates:ro
    ipc: host
    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]
    healthcheck:
      test: ["CMD", "curl", "-f", "http://localhost:8000/health"]
      interval: 30s
      timeout: 10s
      start_period: 40m
    depends_on: [redis]
  webui:
    image: ghcr.io/open-webui/open-webui:main
    ports: ["3000:8080"]
""",
    "SGLang alone": """services:
  sglang:
    image: lmsysorg/sglang:v0.5.3
    entrypoint: python3 -m sglang.launch_server
    command: ["--model-path", "meta-llama/Llama-3.1-8B-Instruct", "--host", "0.0.0.0", "--port", "30000", "--tp", "2"]
    environment: {HF_TOKEN: "${HF_TOKEN}", NCCL_DEBUG: INFO}
    network_mode: host
    ulimits: {memlock: -1}
    shm_size: 32g
    healthcheck: {test: "curl -f http://localhost:30000/health_generate || exit 1"}
    deploy: {resources: {reservations: {devices: [{driver: nvidia, device_ids: ["0", "1"], capabilities: [gpu]}]}}}
""",
}
