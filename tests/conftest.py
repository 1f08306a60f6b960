import os
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter, which must be asked for before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every machine and in every run: a failure here is a failure there.
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("suite")

torch.set_num_threads(1)  # the tensors here are small: a second thread waits more than it works


@pytest.fixture(scope="session", autouse=True)
def kernels_stay_inside_their_tensors() -> Iterator[None]:
    check = nullcontext()
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        import inside

        check = inside.checked()
    with check:
        yield


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    """What is allocated and not yet written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty_like(torch.ones(3)).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
