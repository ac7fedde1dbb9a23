"""`python -m common.nodes`: several nodes on one Linux machine, joined by cables as slow as you like.

    python -m common.nodes --nodes 2 --ranks 2 --bandwidth 200mbit -- step05_pipeline/train.py --pp 2 --tp 2

A node has a network and processes of its own (two namespaces of the kernel), and is joined to the others by a virtual
cable that the kernel limits. Each node runs its own torchrun, and ranks on different nodes reach each other over the
cable alone, and nothing else in the world. The files are the same on all nodes, as on a cluster with a shared disk.

It needs no root: in a user namespace, any user may build networks. The command is a shell script, which `--print`
shows. When it ends, whatever ended it, its nodes are killed, and the kernel removes all that it has built.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys

from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors, summary

SEPARATE = "unshare --user --map-root-user --net --mount"  # users, networks and mounts of one's own
ADVICE = "Nodes need Linux with util-linux and iproute2, and sudo or a container started with --privileged where users"
ADVICE += " may not make namespaces; --latency needs netem in the kernel; --link simulates a slow link anywhere"
RATE, DELAY = r"\d+(\.\d+)?[kmg]bit", r"\d+(\.\d+)?(us|ms|s)"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Become the script, or print it. Raises UsageError where nodes are impossible."""
    options = parse(sys.argv[1:] if argv is None else argv)
    if options.print:
        return print(f"{SEPARATE} bash -e <<'END'\n{script(options)}\nEND")
    try:
        quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        subprocess.run([*SEPARATE.split(), "true"], check=True, **quiet)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # bash does not trap what is ignored, as in a background job
        os.execvp("unshare", [*SEPARATE.split(), "bash", "-ec", script(options)])
    except OSError as error:
        why = error.strerror
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip()
    raise UsageError(f"{SEPARATE}: {why}. {ADVICE}")


def value_of(text: str) -> float:
    """Bits per second, or seconds: of 200mbit, 2e8."""
    value, unit = re.fullmatch(r"([\d.]+)(\w+)", text).groups()
    return float(value) * UNITS[unit]


def parse(argv: list[str]) -> argparse.Namespace:
    """What the command line asks for. Raises UsageError when that is impossible."""
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    text = "everything after -- is for torchrun: a script, or -m and a module, and its flags"
    parser = OneLineParser(prog="python -m common.nodes", description=summary(__doc__), epilog=text)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each node (default: 2)")
    parser.add_argument("--bandwidth", help="of each cable, per direction: 200mbit (default: no limit)")
    parser.add_argument("--latency", help="from node to node: 0.5ms (default: nothing is added)")
    parser.add_argument("--print", action="store_true", help="show the shell commands instead of running them")
    options = parser.parse_args(own)
    bandwidth, latency = options.bandwidth, options.latency
    for bad, line in (
        (bandwidth and not re.fullmatch(RATE, bandwidth), f"--bandwidth: {bandwidth} is not of the form 200mbit"),
        (latency and not re.fullmatch(DELAY, latency), f"--latency: {latency} is not of the form 0.5ms"),
        (not 2 <= options.nodes <= 250, f"--nodes {options.nodes} is not between 2 and 250"),
        (options.ranks < 1, f"--ranks {options.ranks} is not positive"),
        (not command, "what shall the nodes run? Write it after --, such as -- step05_pipeline/train.py --pp 2"),
    ):
        if bad:
            raise UsageError(line)
    options.command = command
    return options


def script(options: argparse.Namespace) -> str:
    """What root types into `bash -e`, in namespaces of its own: it builds the nodes, runs them, and counts bytes.

    Its status is 0, that of a node that failed, 130 after Ctrl-C, or 2 when this system refuses a part of the network.
    """
    nodes = range(options.nodes)
    lines = [f"trap 'echo \"error: $BASH_COMMAND. {ADVICE}\" >&2; exit 2' ERR", *network(options), "trap - ERR"]
    lines += ["trap 'exit 130' INT TERM", "echo to look inside: nsenter -t $$ -U -m -n --preserve-credentials"]
    lines += [f"{torchrun(options, node)} &" for node in nodes]
    lines += ["status=0", "for node in $(jobs -p); do wait $node || status=$?; done"]
    for node in nodes:
        count = f"$(ip netns exec node{node} cat /sys/class/net/cable/statistics/%s_bytes)"
        lines.append(f'echo "cable of node{node}: {count % "tx"} bytes sent, {count % "rx"} received"')
    return "\n".join([*lines, "exit $status"])


def network(options: argparse.Namespace) -> list[str]:
    """The commands that build the nodes and their cables."""
    nodes = [f"node{index}" for index in range(options.nodes)]
    lines = ["mount -t tmpfs none /run", "mkdir /run/netns", *(f"ip netns add {node}" for node in nodes)]
    if len(nodes) == 2:
        lines.append("ip link add cable netns node0 type veth peer name cable netns node1")
    else:  # a cable from each node to a switch, which is where we are
        lines += ["ip link add switch type bridge", "ip link set switch up"]
        for index, node in enumerate(nodes):
            lines.append(f"ip link add port{index} type veth peer name cable netns {node}")
            lines.append(f"ip link set port{index} master switch up")
            lines += limit("tc", f"port{index}", options.bandwidth, None)  # what comes out of the switch
    for index, node in enumerate(nodes):
        lines.append(f"ip -n {node} link set lo up")  # ranks of one node talk through it: memory, without a limit
        lines.append(f"ip -n {node} address add 10.0.0.{index + 1}/24 dev cable")
        lines.append(f"ip -n {node} link set cable up")
        lines += limit(f"tc -n {node}", "cable", options.bandwidth, options.latency)
    return lines


def limit(tc: str, device: str, bandwidth: str | None, latency: str | None) -> list[str]:
    """The commands that make what leaves through a device slow (tbf: a token bucket filter) and late (netem).

    A burst is what may leave at once after a pause: a packet, or what the cable carries in 0.2 ms if that is more.
    """
    lines, place = [], "root"
    if bandwidth:
        burst = max(2000, round(value_of(bandwidth) / 8 * 2e-4))
        lines.append(f"{tc} qdisc add dev {device} root handle 1: tbf rate {bandwidth} burst {burst}b latency 1s")
        place = "parent 1:1"
    if latency:
        lines.append(f"{tc} qdisc add dev {device} {place} netem delay {latency} limit 100000")
    return lines


def torchrun(options: argparse.Namespace, node: int) -> str:
    """The command that runs a node. It is one process, `unshare`: whatever ends it ends all processes of the node."""
    settings = {"GLOO_SOCKET_IFNAME": "cable", "NCCL_SOCKET_IFNAME": "cable"}
    settings["NCCL_HOSTID"] = f"node{node}"  # nodes differ, although the machine has one name
    settings["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it would warn that addresses have no names
    settings["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # the nodes share the cores
    words = f"setpriv --pdeathsig KILL ip netns exec node{node} unshare --pid --fork --kill-child env".split()
    words += [f"{name}={value}" for name, value in settings.items()]
    words += f"{sys.executable} -m torch.distributed.run --master_addr 10.0.0.1 --master_port 29500".split()
    words += f"--nnodes {options.nodes} --node_rank {node} --nproc_per_node {options.ranks}".split()
    return shlex.join([*words, *options.command])


if __name__ == "__main__":
    raise SystemExit(main())
