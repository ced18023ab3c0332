"""All architectures."""

from .architecture import Architecture
from .audio import AUDIO
from .decoders import DECODERS
from .encoder_decoders import ENCODER_DECODERS
from .encoders import ENCODERS
from .experts import EXPERTS
from .heads import HEADS
from .multimodal import MULTIMODAL
from .others import OTHERS
from .recurrent import RECURRENT
from .scenes import SCENES
from .series import SERIES
from .vision import VISION

__all__ = ["ARCHITECTURES"]

ARCHITECTURES: list[Architecture] = [
    *DECODERS,
    *EXPERTS,
    *RECURRENT,
    *ENCODERS,
    *HEADS,
    *ENCODER_DECODERS,
    *VISION,
    *AUDIO,
    *MULTIMODAL,
    *SCENES,
    *SERIES,
    *OTHERS,
]
