"""Names that the experiments of steps 3 to 5 still import from here; they moved to common/experiments."""

from collections.abc import Callable

from common.experiments import figures
from common.experiments.figures import figure_path, new_figure  # noqa: F401
from common.experiments.runner import run_experiments
from common.experiments.runs import (  # noqa: F401
    BUCKET_MB,
    MODEL,
    overlay,
    reference_gradients,
    run_jobs,
    tensor_sizes,
)
from common.experiments.tables import print_comparison as against  # noqa: F401
from common.experiments.traces import computation, quiet_step, quietest  # noqa: F401


def command(step: str, description: str, experiments: dict[str, Callable]) -> int:
    """Run the experiments that the command line names."""
    return run_experiments(step, description, list(experiments.values()))


def finish_figure(name: str, figure=None) -> None:
    """Save `figure`, unless that is done."""
    if figure is not None:
        figures.save_figure(figure, name)
    else:
        print(f"  figure: {figure_path(name)}")
