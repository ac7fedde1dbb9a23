"""`python -m common.nodes`: several nodes on one Linux machine, joined by cables as slow as you like.

    python -m common.nodes --nodes 2 --ranks 2 --bandwidth 200mbit -- step05_pipeline/train.py --pp 2 --tp 2
    python -m common.nodes --nodes 2 --ranks 2 --bandwidth 200mbit --print -- step05_pipeline/train.py --pp 2 --tp 2

A node has a network of its own (a network namespace) and processes of its own (a process namespace), and is joined to
the others by a virtual cable that the kernel limits. Each node runs its own torchrun, and ranks on different nodes
reach each other over the cable alone, and nothing else in the world. The files are the same on all nodes, as on a
cluster with a shared disk.

It needs no root: in a user namespace, any user may build networks. All of it exists only for the processes inside, so
the kernel removes it when the last of them has ended, whatever ended them. `--print` shows how it is done.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from common.launching.command_line import OneLineParser

SEPARATE = "unshare --user --map-root-user --net --mount"  # users, networks and mounts of one's own
TOOLS = {"unshare": "util-linux", "setpriv": "util-linux", "mount": "util-linux", "ip": "iproute2", "tc": "iproute2"}
ADVICE = "Try sudo, or a container started with --privileged; --link simulates a slow link anywhere"
INSIDE = "COMMON_NODES_INSIDE"  # environment variable of the second start of this command
GRACE = 15  # seconds that nodes have to end after Ctrl-C
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    try:
        if options.print:
            print(script(options))
            return 0
        return run(options) if os.environ.pop(INSIDE, None) else enter(argv)
    except NotHere as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class NotHere(Exception):
    """This system lacks something, or forbids it."""


# ---- the command line ------------------------------------------------------------------------------------------------


def quantity(text: str, units: str, example: str) -> str:
    """Check the argument of a flag, such as 200mbit. Raises ArgumentTypeError if it is none."""
    if not re.fullmatch(rf"\d+(\.\d+)?({units})", text) or not value_of(text):
        raise argparse.ArgumentTypeError(f"{text} is not of the form {example}")
    return text


def value_of(text: str) -> float:
    """Bits per second, or seconds: of 200mbit, 2e8."""
    value, unit = re.fullmatch(r"([\d.]+)(\w+)", text).groups()
    return float(value) * UNITS[unit]


def parse(argv: list[str]) -> argparse.Namespace:
    """What the command line asks for; ends the process with one line and status 2 when that is impossible."""
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    text = "everything after -- is for torchrun: a script, or -m and a module, and its flags"
    parser = OneLineParser(prog="python -m common.nodes", description=__doc__.splitlines()[0], epilog=text)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each node (default: 2)")
    rate = partial(quantity, units="[kmg]bit", example="200mbit (kbit, mbit or gbit)")
    parser.add_argument("--bandwidth", type=rate, help="of each cable, per direction: 200mbit (default: no limit)")
    delay = partial(quantity, units="us|ms|s", example="0.5ms (us, ms or s)")
    parser.add_argument("--latency", type=delay, help="from node to node: 0.5ms (default: nothing is added)")
    parser.add_argument("--print", action="store_true", help="show the shell commands instead of running them")
    options = parser.parse_or_exit(own)
    for bad, line in (
        (not 2 <= options.nodes <= 250, f"--nodes {options.nodes} is not between 2 and 250"),
        (options.ranks < 1, f"--ranks {options.ranks} is not positive"),
        (options.bandwidth and not 1e4 <= value_of(options.bandwidth) <= 1e11, "--bandwidth: from 10kbit to 100gbit"),
        (not command, "what shall the nodes run? Write it after --, such as -- step05_pipeline/train.py --pp 2"),
    ):
        if bad:
            parser.exit(2, f"error: {line}\n")
    options.command = command
    return options


# ---- the shell commands ----------------------------------------------------------------------------------------------


def network(options: argparse.Namespace) -> list[str]:
    """The commands that build the nodes and their cables, typed as root in namespaces of one's own."""
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
        lines.append(f"ip -n {node} address add {address(index)}/24 dev cable")
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


def address(node: int) -> str:
    return f"10.0.0.{node + 1}"


def torchrun(options: argparse.Namespace, node: int) -> tuple[dict[str, str], list[str]]:
    """What a node runs: environment variables, and the command."""
    variables = {"GLOO_SOCKET_IFNAME": "cable", "NCCL_SOCKET_IFNAME": "cable"}
    variables["NCCL_HOSTID"] = f"node{node}"  # nodes differ, although the machine has one name
    variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it would warn that addresses have no names
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # the nodes share the cores
    command = f"-m torch.distributed.run --nnodes {options.nodes} --node_rank {node} --nproc_per_node {options.ranks}"
    command += f" --master_addr {address(0)} --master_port 29500"
    return variables, [sys.executable, *command.split(), *options.command]


def within(node: int) -> list[str]:
    """What stands before a command that a node runs: it makes the node's processes end all together."""
    return f"setpriv --pdeathsig KILL ip netns exec node{node} unshare --pid --fork --kill-child".split()


def script(options: argparse.Namespace) -> str:
    """A shell script that does what this command does, but for the end: it waits for all nodes."""
    lines = [f"{SEPARATE} bash -e <<'END'", *network(options)]
    for node in range(options.nodes):
        variables, command = torchrun(options, node)
        settings = [f"{name}={value}" for name, value in variables.items()]
        lines.append(shlex.join([*within(node), "env", *settings, *command]) + " &")
    return "\n".join([*lines, "wait", "ip -n node0 -s link show cable", "END"])


# ---- running them ----------------------------------------------------------------------------------------------------


def enter(argv: list[str]) -> int:
    """Become this same command, as root in namespaces of its own. Raises NotHere where that is impossible."""
    missing = sorted(tool for tool in TOOLS if not shutil.which(tool))
    if sys.platform != "linux":
        raise NotHere(f"nodes are Linux network namespaces, which {sys.platform} does not have. {ADVICE}")
    if missing:
        packages = " and ".join(sorted({TOOLS[tool] for tool in missing}))
        raise NotHere(f"{', '.join(missing)} not found: install {packages}")
    allowed = subprocess.run([*SEPARATE.split(), "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if allowed.returncode:
        raise NotHere(f"this system does not let you make namespaces ({allowed.stderr.strip()}). {ADVICE}")
    os.environ[INSIDE] = "1"
    command = [*SEPARATE.split(), sys.executable, "-m", "common.nodes", *argv]
    os.execvp(command[0], command)


def run(options: argparse.Namespace) -> int:
    """Build the nodes, run the command on them, print what their cables have carried; returns the exit status."""
    for line in network(options):
        done = shell(line)
        if done.returncode:
            error = (done.stderr.strip().splitlines() or ["failed"])[0]
            why = ADVICE if "permitted" in error else ""
            why = "This kernel has no netem: leave --latency out" if "netem" in line else why
            raise NotHere(f"{line}: {error} {why}".strip())
    print(f"to look inside: nsenter -t {os.getpid()} -U -m -n --preserve-credentials", flush=True)
    nodes = Nodes()
    try:
        for node in range(options.nodes):
            nodes.start(node, *torchrun(options, node))
        status = nodes.wait()
    finally:
        nodes.kill()
    for node in range(options.nodes):
        (cable,) = json.loads(shell(f"ip -n node{node} -s -j link show cable").stdout)
        sent, received = (cable["stats64"][way]["bytes"] for way in ("tx", "rx"))
        print(f"cable of node{node}: {sent:,} bytes sent, {received:,} received", flush=True)
    return status


def shell(line: str) -> subprocess.CompletedProcess:
    """Run a line as a shell would."""
    return subprocess.run(line, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)


class Nodes:
    """The nodes that run. Each is one process, `unshare`: whatever ends it ends all processes of its node."""

    def __init__(self):
        self.processes, self.stopped = [], 0
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(each, self.stop)

    def start(self, node: int, variables: dict[str, str], command: list[str]) -> None:
        """Start a node, in a session of its own: Ctrl-C comes to us alone."""
        if not self.stopped:
            io = {"stdin": subprocess.DEVNULL, "env": os.environ | variables, "start_new_session": True}
            self.processes.append(subprocess.Popen([*within(node), *command], **io))

    def stop(self, signal_number: int, _) -> None:
        """Pass a signal on to every torchrun. After a second one, or when the time is over, kill the nodes."""
        if self.stopped:
            return self.kill()
        self.stopped = signal_number
        signal.alarm(GRACE)
        for process in self.processes:
            if process.poll() is None:
                for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                    os.kill(int(child), signal_number)

    def wait(self) -> int:
        """Wait for all nodes. Returns the status of the first that failed; after a signal 128 and its number."""
        statuses = [process.wait() for process in self.processes]
        if self.stopped:
            return 128 + self.stopped
        return next((status if status > 0 else 128 - status for status in statuses if status), 0)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
