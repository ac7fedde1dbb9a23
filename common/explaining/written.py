"""What two run records say outright: other settings, another learning rate, a resume. No curve is needed for that."""

from common.config import flag_names
from common.explaining.logs import Log


def changed_settings(ours: dict, theirs: dict) -> list[str]:
    """Flags of the model, the data and the update that differ in two configurations, as "lr 0.1 instead of 0.2"."""
    ours, theirs = (each | each.get("model_config", {}) for each in (ours, theirs))
    names = [key for key in flag_names("model", "data", "update") if key in ours.keys() & theirs.keys()]
    return [f"{key} {ours[key]} instead of {theirs[key]}" for key in names if ours[key] != theirs[key]]


def written_reasons(a: Log, b: Log, shift: int) -> list[str]:
    """What the records of two runs say about why they differ; step k of `a` is beside step k + shift of `b`."""
    found = []
    if changed := changed_settings(b.config, a.config):
        found.append(f"the run records differ: {', '.join(changed)}. So this is not the same training")
    for key, name in ("lr", "learning rate"), ("loss_scale", "loss scale"):
        first, second = a.values.get(key, {}), b.values.get(key, {})
        for step in sorted(first.keys() & {step - shift for step in second}):
            x, y = first[step], second[step + shift]
            if abs(x - y) > 1e-6 * max(abs(x), abs(y)):
                found.append(f"the {name} that is written differs from step {step} on: {y:g} instead of {x:g}")
                break
    if b.config.get("resume"):
        found.append("the record of the second run says that it was resumed (--resume)")
    return found
