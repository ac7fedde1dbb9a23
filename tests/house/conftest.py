"""A sketch that one process runs leaves a group of one rank, which later tests of this process must not find."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
