#!/usr/bin/env bash
# Train torch_examples/digits.py on two containers, over ssh, and leave nothing behind.
#
#   docker/two_nodes.sh [--mpi | --gloo] [OPTIONS OF digits.py]
#
# ENGINE   docker or podman; otherwise the first of them that answers
# IMAGE    an image to take; otherwise hvd_pipe:cpu is built from docker/Dockerfile.cpu
# ENGINE_ARGS, BUILD_ARGS, NETWORK_ARGS, RUN_ARGS   more words for: all calls, build, network
#          create, run (RUN_ARGS='--user root' has the nodes be root's)
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "two_nodes: $*" >&2
  exit 1
}

# shellcheck disable=SC2086  # these variables hold several words each
engine() {
  case $1 in
    build) set -- "$1" ${BUILD_ARGS:-} "${@:2}" ;;
    network) [[ $2 != create ]] || set -- "$1" "$2" ${NETWORK_ARGS:-} "${@:3}" ;;
    run) set -- "$1" ${RUN_ARGS:-} "${@:2}" ;;
  esac
  "$ENGINE" ${ENGINE_ARGS:-} "$@"
}

for name in ${ENGINE:-docker podman}; do
  ENGINE=$name
  if command -v "$name" >/dev/null && engine info >/dev/null 2>&1; then break; fi
  ENGINE=
done
[[ $ENGINE ]] || fail "no container engine answers: start Docker, install podman, or set ENGINE."
command -v ssh-keygen >/dev/null || fail "no ssh-keygen here: install OpenSSH's client."

controller=--mpi
case ${1:-} in --mpi | --gloo) controller=$1 && shift ;; esac

job=hvd-pipe-$$
folder=$(mktemp -d)
clean() {
  engine rm -f "$job-node1" "$job-node2" >/dev/null 2>&1 || true
  engine network rm "$job" >/dev/null 2>&1 || true
  rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT TERM

if [[ -z ${IMAGE:-} ]]; then
  IMAGE=hvd_pipe:cpu
  engine build -f docker/Dockerfile.cpu -t "$IMAGE" .
fi

# The nodes' user reads the keys through the mount; on this host the folder above them is ours alone.
keys=$folder/keys
mkdir "$keys"
ssh-keygen -q -t ed25519 -N '' -C "$job" -f "$keys/id_ed25519"
cp "$keys/id_ed25519.pub" "$keys/authorized_keys"
chmod 755 "$keys" && chmod 644 "$keys"/*

engine network create "$job" >/dev/null
for node in node1 node2; do
  engine run -d --name "$job-$node" --hostname "$node" --network "$job" --network-alias "$node" \
    -v "$keys:/keys:ro,z" "$IMAGE" node >/dev/null
done

try() { engine exec "$job-node1" ssh -o ConnectTimeout=1 "$1" hostname 2>&1; }
for node in node1 node2; do
  for ((i = 1; ; i++)); do
    if answer=$(try "$node"); then break; fi
    if ((i == 30)); then
      engine logs "$job-$node" >&2 || true
      fail "no ssh from node1 to $node: ${answer##*$'\n'} (above: what $node says)."
    fi
    sleep 0.5
  done
done

engine exec "$job-node1" horovodrun -np 2 -H node1:1,node2:1 -p 2222 "$controller" \
  python /opt/hvd_pipe/torch_examples/digits.py "$@"

for node in node1 node2; do
  sent=$(engine exec "$job-$node" cat /sys/class/net/eth0/statistics/tx_bytes)
  echo "$node ($(engine exec "$job-$node" id -un)) sent $((sent / 1000)) kB over the network"
done
