"""Set up for the Keras tests: the backend that ``KERAS_BACKEND`` names, fixed seeds, and filters for warnings of other packages."""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # at these sizes, compiling takes longer than it saves

import keras
import pytest

HERE = Path(__file__).parent
# Keras converts tensors with numpy's old protocol.
NUMPY_COPY = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their marks
def pytest_collection_modifyitems(items):
    """Every case runs on torch; on the other backends, which compile each shape anew, only the first of a test is not thorough."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(NUMPY_COPY))
            if item.get_closest_marker("thorough") is None:
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if keras.backend.backend() != "torch":
        for item in (case for several in cases.values() for case in several[1:]):
            item.add_marker(pytest.mark.thorough)


def pytest_report_header():
    return f"keras {keras.__version__} on {keras.backend.backend()}"


@pytest.fixture(autouse=True)
def keras_seed():
    keras.utils.set_random_seed(2006_04768)
    yield
    keras.config.set_dtype_policy("float32")
