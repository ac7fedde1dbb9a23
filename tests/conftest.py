"""What holds for every test: few threads, no network, no window, no process left behind."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries of Hugging Face are imported
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

from tests.harness.ranks import stop_fork_server

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_sessionfinish():
    stop_fork_server()
