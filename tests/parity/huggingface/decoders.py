"""Decoders: language models that predict the next token."""

from .architecture import Architecture, family
from .encoders import REFORMER
from .inputs import next_tokens

__all__ = ["DECODERS"]

_WITH_COMMON_SIZES = (
    "ApertusForCausalLM ArceeForCausalLM BartForCausalLM BertGenerationDecoder BertLMHeadModel "
    "BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM BloomForCausalLM "
    "Cohere2ForCausalLM CohereForCausalLM CwmForCausalLM DiffLlamaForCausalLM "
    "DogeForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM FalconForCausalLM "
    "GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM Gemma2ForCausalLM "
    "Gemma3ForCausalLM Gemma4UnifiedForCausalLM GemmaForCausalLM Glm4ForCausalLM GlmForCausalLM GraniteForCausalLM "
    "GraniteSWAForCausalLM HeliumForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM HyperCLOVAXForCausalLM "
    "Jais2ForCausalLM LlamaForCausalLM MBartForCausalLM MarianForCausalLM MegatronBertForCausalLM "
    "MiniCPM3ForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MllamaForCausalLM "
    "ModernBertDecoderForCausalLM MptForCausalLM MvpForCausalLM NanoChatForCausalLM NemotronForCausalLM "
    "OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OpenAIGPTLMHeadModel PLBartForCausalLM "
    "PegasusForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM ProphetNetForCausalLM Qwen2ForCausalLM "
    "Qwen3ForCausalLM RemBertForCausalLM RoFormerForCausalLM RobertaForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM "
    "StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM VaultGemmaForCausalLM WhisperForCausalLM "
    "XGLMForCausalLM XLMWithLMHeadModel XLNetLMHeadModel YoutuForCausalLM"
)

DECODERS: list[Architecture] = [
    *family("decoder", next_tokens, _WITH_COMMON_SIZES.split()),
    *family(
        "decoder",
        next_tokens,
        {
            "CTRLLMHeadModel": {"dff": 32},
            "CodeGenForCausalLM": {"num_attention_heads": 4, "rotary_dim": 4},
            "GPTJForCausalLM": {"rotary_dim": 4},
            "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        },
    ),
    *family(
        "decoder",
        next_tokens,
        {"ReformerModelWithLMHead": {"is_decoder": True, **REFORMER}},
        whole=("reformer.encoder",),
        note="its reversible layers are one autograd Function: the encoder is marked as a unit",
    ),
]
