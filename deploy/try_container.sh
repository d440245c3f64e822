#!/usr/bin/env bash
# Build the image, run it as docs/install.md says, and ask it: a container that is not as described ends this with 1.
#
#   deploy/try_container.sh                      with the base of deploy/Containerfile
#   deploy/try_container.sh --debian bookworm    with a base made by mmdebstrap, where no registry can be reached
#
# ENGINE (podman or docker), BUILD_ARGS and RUN_ARGS (more options of its build and its run), PORT, and MODEL
# can be set. Nothing stays but the images.
set -euo pipefail
cd "$(dirname "$0")/.."
ENGINE=${ENGINE:-podman} PORT=${PORT:-18000} MODEL=${MODEL:-bundled:text}
read -ra build_args <<< "${BUILD_ARGS:-}"
read -ra run_args <<< "${RUN_ARGS:-}"
name=dgemma-try-$$
scratch=$(mktemp -d)

clean_up() {
    $ENGINE rm --force --volumes "$name" > /dev/null 2>&1 || true
    $ENGINE volume rm "$name" > /dev/null 2>&1 || true
    rm -rf "$scratch"
}
trap clean_up EXIT

fail() {
    echo "FAILED: $*" >&2
    $ENGINE logs "$name" 2>&1 | tail -20 >&2 || true
    exit 1
}

inside() { $ENGINE exec "$name" "$@"; }

if [[ ${1:-} == --debian ]]; then
    echo "--- base: Debian $2"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates "$2" "$scratch/base.tar"
    $ENGINE import "$scratch/base.tar" "localhost/debian-python:$2" > /dev/null
    build_args+=(--build-arg "BASE=localhost/debian-python:$2")
fi
# Docker's image format has HEALTHCHECK, OCI's has none.
[[ $ENGINE == podman ]] && build_args+=(--format docker)

echo "--- build"
$ENGINE build -f deploy/Containerfile -t dgemma ${build_args[@]+"${build_args[@]}"} .
$ENGINE image inspect dgemma --format 'image of {{.Size}} bytes, user {{.Config.User}}'

echo "--- run: read-only, no capability, not root"
$ENGINE run --detach --name "$name" --read-only --cap-drop all --security-opt no-new-privileges --tmpfs /tmp \
    -p "127.0.0.1:$PORT:8000" -v "$name:/cache" ${run_args[@]+"${run_args[@]}"} dgemma serve "$MODEL"
address=http://127.0.0.1:$PORT
for _ in $(seq 300); do
    curl --silent --fail "$address/health" > /dev/null && break
    [[ $($ENGINE inspect --format '{{.State.Running}}' "$name") == true ]] || fail "it ended"
    sleep 1
done
for path in /health /ready; do echo "$path: $(curl --silent --show-error --fail "$address$path")"; done

[[ $(inside id -u) == 10001 ]] || fail "it runs as $(inside id)"
inside grep -E '^(Uid|CapEff|NoNewPrivs|Seccomp):' /proc/1/status
inside sh -c 'touch /opt/dgemma/x 2> /dev/null' && fail "the root file system can be written"
inside sh -c 'touch /cache/x /tmp/x && rm /cache/x /tmp/x' || fail "/cache and /tmp cannot be written"
inside sh -c 'command -v pip' && fail "the image has pip"
$ENGINE image inspect dgemma --format '{{index .Config.Healthcheck.Test 0}}' | grep -qx CMD || fail "no HEALTHCHECK"
inside python -c "$($ENGINE image inspect dgemma --format '{{index .Config.Healthcheck.Test 3}}')" \
    || fail "HEALTHCHECK fails while the server works"

echo "--- a streamed chat"
curl --silent --show-error --fail --no-buffer "$address/v1/chat/completions" -H 'content-type: application/json' -d '{
    "model": "'"$MODEL"'", "stream": true, "seed": 1, "max_tokens": 32,
    "messages": [{"role": "user", "content": "On Sunday Emma went to the market."}]}' | tee "$scratch/stream"
grep -q '"content"' "$scratch/stream" || fail "the stream has no text"
grep -qx 'data: \[DONE\]' "$scratch/stream" || fail "the stream does not end"
curl --silent --fail "$address/metrics" | grep '^dgemma_http_requests_total' || fail "no metrics"

echo "--- stop"
$ENGINE stop --time 60 "$name" > /dev/null
status=$($ENGINE inspect --format '{{.State.ExitCode}}' "$name")
[[ $status == 0 ]] || fail "it ended with status $status"
echo "ended with status 0 after SIGTERM; all of it is as described"
