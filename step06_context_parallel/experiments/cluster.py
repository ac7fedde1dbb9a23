"""What one machine cannot measure: predicted for real hardware, and labelled so."""

from common.costs.hardware import H100_TFLOPS
from common.costs.networks import NETWORK, NVLINK
from common.drawing.tables import print_table
from common.presets import PRESETS
from step06_context_parallel import cost

PEAK = H100_TFLOPS * 1e12
BANDWIDTHS = {"NVLink": NVLINK, "InfiniBand": NETWORK}
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b")


def condition(quick: bool) -> None:
    """PREDICTED: tokens of a rank from which on the ring hides behind attention, for H100-like numbers."""
    rows = []
    for name in ("8 B without grouped queries", *MODELS):
        model = PRESETS[name if name in PRESETS else MODELS[0]]
        share = model.kv_heads / model.heads if name in PRESETS else 1.0
        for link, bandwidth in BANDWIDTHS.items():
            least = [
                cost.tokens_to_hide(PEAK, bandwidth, share, causal, backward)
                for causal, backward in ((True, False), (True, True), (False, False))
            ]
            cells = (f"{share:.4g}", *(f"{each:,.0f}" for each in least), f"{131072 / max(least[:2]):.1f}")
            rows.append((f"{name}, {link}", *cells))
    header = ("", "h_kv / h", "forward", "backward", "forward, not causal", "cp up to which 128k tokens hide")
    print_table(f"predicted: tokens per rank from which on a hop hides, at {H100_TFLOPS:g} TFLOP/s", header, rows)
