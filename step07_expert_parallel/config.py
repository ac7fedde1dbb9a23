"""The rules that the flags about experts obey, after those of step 6."""

from common.config import TrainConfig, flag_names, spelled
from common.errors import UsageError
from step05_pipeline.config import schedule_of
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.simulator import Costs, simulate
from step06_context_parallel import config as step06


def takes_turns(config: TrainConfig, schedule: Schedule) -> bool:
    """Whether in the schedule's pairs of a forward and a backward, one computes while the other's tokens travel."""
    return schedule.overlapped and config.ep > 1


def check(config: TrainConfig) -> None:
    """As in step 6. Moreover, the experts fit together and on their ranks, no flag about them means nothing, and pairs
    of a forward and a backward do not wait for each other.
    """
    step06.check(config)
    shape = config.model_config
    if not shape.experts:
        for name in flag_names("model", "update", "layout"):
            introduced = TrainConfig.__dataclass_fields__[name].metadata["step"] == 7
            if introduced and getattr(config, name) not in (getattr(TrainConfig, name), 0):
                raise UsageError(f"{spelled(name)} {getattr(config, name)} needs --experts")
        return
    for name, balance in (("aux_coef", "aux"), ("bias_rate", "bias")):
        if config.balance != balance and getattr(config, name) != getattr(TrainConfig, name):
            raise UsageError(f"{spelled(name)} {getattr(config, name)} needs --balance {balance}")
    for name, needed in (("expert_groups", "node_limit"), ("node_limit", "expert_groups")):
        if getattr(config, name) and not getattr(config, needed):
            raise UsageError(f"{spelled(name)} {getattr(config, name)} needs {spelled(needed)}")
    groups, per_token = shape.expert_groups, shape.groups_per_token
    if shape.expert_ffn < 1:
        raise UsageError(f"--expert-ffn {shape.expert_ffn} must be at least 1")
    if shape.dense_layers >= shape.layers:
        raise UsageError(f"--dense-layers {shape.dense_layers} leaves none of --layers {shape.layers} for experts")
    if shape.experts % groups:
        raise UsageError(f"--expert-groups {groups} does not divide --experts {shape.experts}")
    if per_token > groups:
        raise UsageError(f"--node-limit {per_token} exceeds --expert-groups {groups}")
    if shape.top_k > (allowed := shape.experts // groups * per_token):
        raise UsageError(f"--top-k {shape.top_k} exceeds the {allowed} experts of --node-limit {per_token} groups")
    ranks = config.dp * config.cp * config.tp
    if shape.experts % config.ep:
        raise UsageError(f"--ep {config.ep} does not divide --experts {shape.experts}")
    if ranks % config.ep:
        raise UsageError(f"--ep {config.ep} does not divide the {ranks} ranks of a stage (dp x cp x tp)")
    if config.tp > 1 and not config.sequence_parallel:
        raise UsageError(f"--tp {config.tp} with --experts needs sequence parallelism, or tokens would be sent twice")
    schedule = schedule_of(config)
    if takes_turns(config, schedule):
        simulate(schedule, Costs(FB=3.0))  # raises UsageError if a pair waits for what follows its own forward
