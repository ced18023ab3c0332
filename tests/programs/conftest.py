"""Before any test module imports a library that needs torchvision."""

import vision_ops

vision_ops.provide()
