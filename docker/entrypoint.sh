#!/usr/bin/env bash
# A container's start: ssh from the mounted keys, then the command.
#
#   node          run sshd on port SSH_PORT until stopped: this container is a host of a job
#   keys          make a key pair in SSH_KEYS, unless there is one
#   COMMAND ...   run it; its ssh, horovodrun and mpirun reach other nodes with the mounted key
#
# SSH_KEYS is a mounted folder with id_ed25519 (logs in to others; id_rsa, as Kubeflow's operators
# call a key of any kind, will do), authorized_keys (who may log in here) and, where wanted,
# ssh_host_ed25519_key (otherwise made anew) and known_hosts.
set -euo pipefail

keys=${SSH_KEYS:-/keys}
port=${SSH_PORT:-2222}
home=$(getent passwd "$(id -u)" | cut -d: -f6) || home=
ssh=$home/.ssh

fail() {
  echo "entrypoint: $*" >&2
  exit 1
}

# ssh wants its files to be ours alone; a mounted folder keeps the owner and the modes of the host.
take_keys() {
  if [[ -z $home ]] || ! install -d -m 700 "$ssh"; then
    fail "user $(id -u) has no home in here: run as hvd, or as root (--user)."
  fi
  for name in id_ed25519 id_rsa authorized_keys known_hosts ssh_host_ed25519_key; do
    if [[ -e $keys/$name ]]; then
      [[ -r $keys/$name ]] || fail "$(id -un) cannot read $keys/$name: chmod a+r it on the host."
      install -m 600 "$keys/$name" "$ssh/$name"
    fi
  done
  # All nodes listen on one port; who knows a node's key already is in known_hosts.
  printf 'Host *\n  Port %s\n  StrictHostKeyChecking accept-new\n' "$port" >"$ssh/config"
}

# A login gets what this container's own commands have, such as PATH and NCCL's settings.
environment() {
  local name
  while read -r name; do
    case ${!name} in
      *'"'* | *$'\n'*) echo "entrypoint: $name holds a quote or a new line: logins lack it" >&2 ;;
      *) printf ' "%s"' "$name=${!name}" ;;
    esac
  done < <(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|(HOROVOD|HVD_PIPE|NCCL|OMP|OMPI|TF|CUDA)_\w+)$')
}

node() {
  [[ -e $keys/authorized_keys ]] ||
    fail "no $keys/authorized_keys: mount the public keys that may log in (-v FOLDER:$keys:ro)."
  take_keys
  local key=$ssh/ssh_host_ed25519_key
  [[ -e $key ]] || ssh-keygen -q -t ed25519 -N '' -f "$key"
  if [[ $(id -u) == 0 ]]; then mkdir -p /run/sshd; fi
  echo "entrypoint: sshd of $(id -un) on port $port"
  exec /usr/sbin/sshd -D -e -f /etc/ssh/hvd_pipe_sshd_config -p "$port" -h "$key" \
    -o "SetEnv$(environment)"
}

new_keys() {
  [[ -w $keys ]] || fail "user $(id -u) cannot write $keys: mount a folder or a volume there."
  [[ -e $keys/id_ed25519 ]] || ssh-keygen -q -t ed25519 -N '' -C hvd_pipe -f "$keys/id_ed25519"
  cp "$keys/id_ed25519.pub" "$keys/authorized_keys"
}

case ${1:-node} in
  node) node ;;
  keys) new_keys ;;
  *)
    if [[ -e $keys/id_ed25519 || -e $keys/id_rsa ]]; then take_keys; fi
    exec "$@"
    ;;
esac
