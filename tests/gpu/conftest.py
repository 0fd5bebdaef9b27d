"""Tests of a GPU in a random order, if GPU_TESTS_SEED gives its seed; compiled ones last, as they may take minutes."""

import os
import random


def pytest_collection_modifyitems(items):
    seed = os.environ.get("GPU_TESTS_SEED")
    if seed is not None:
        random.Random(seed).shuffle(items)
        items.sort(key=lambda item: "compiled" in item.name)
