"""Before any test module imports a library that needs torchvision."""

from importlib.util import find_spec

import vision_ops

if find_spec("torchvision") is None:  # the extra is not installed
    collect_ignore_glob = ["test_*.py"]
else:
    vision_ops.provide()
