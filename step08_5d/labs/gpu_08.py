"""The lab for those who have a GPU: copies that hide behind products, counted in a trace."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import UsageError
from common.labs.find import ROOT
from common.labs.lab import Verdict
from common.labs.write import NUMBERS, USUALLY, Writing, page
from step08_5d.labs.overlap import during, faults, spans
from step08_5d.labs.profiled import digest

CLOSE = 1e-2  # relative difference in float16, as products of other shapes may add up in another order
SECONDS = 300
COMMAND = "python -m step08_5d.labs.profiled"


@dataclass(frozen=True, kw_only=True)
class TraceLab(Writing):
    """A check counts in a trace of the GPU, which it makes, or which the student has brought from another machine."""

    def check(self, folder: Path, student: int) -> Verdict:
        file, trace = self.written(folder), folder / "trace.json"
        if torch.cuda.is_available():
            trace.unlink(missing_ok=True)
            command = [sys.executable, "-m", COMMAND.split()[-1], str(file)]
            try:
                run = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=SECONDS)
            except subprocess.TimeoutExpired:
                return Verdict(0.0, (f"it does not end in {SECONDS} s.",), unjudged=True)
            if run.returncode:
                why = run.stderr.strip().splitlines()[-1].removeprefix("error: ")
                return Verdict(0.0, (f"{why}.",), unjudged=True)
        return self.grade(self.read(trace, file))

    def read(self, path: Path, file: Path) -> dict:
        """The trace of this file. Raises UsageError if there is none, and no GPU to make one."""
        if not path.exists():
            bring = f"run `{COMMAND} FILE` where there is one, and put its trace.json beside {file.name}"
            raise UsageError(f"{self.id} needs a GPU: {bring}")
        try:
            trace = json.loads(path.read_text(encoding="utf-8"))
            made_of = trace["lab"]["file"]
            spans(trace)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{path} is no trace that `{COMMAND}` has written") from None
        if made_of != digest(file):
            raise UsageError(f"{path} is of another {file.name}: run `{COMMAND} FILE` again where there is a GPU")
        return trace

    def grade(self, trace: dict) -> Verdict:
        """The verdict on a trace."""
        copies, kernels = spans(trace)
        hidden = sum(bool(during(copy, kernels)) for copy in copies)
        seen = f"{trace['lab']['device']}: {hidden} of {len(copies)} copies ran while a kernel ran."
        found, off = list(faults(trace)), trace["lab"]["difference"]
        if not off <= CLOSE:  # nor nan
            reason = "a product was started before its matrix had arrived, or a matrix was overwritten in use."
            found = [f"the result differs from ours by {off:.1e} of its norm.", f"{USUALLY} {reason}", *found]
            return Verdict(0.0, (seen, *found))
        return Verdict(NUMBERS if found else 1.0, (seen, *found))


LABS = [TraceLab(**page(__file__, "gpu-08-a"), source="step08_5d/labs/borrowed.py", bodies=(1,))]
