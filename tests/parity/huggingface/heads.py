"""Other tasks of text models: classes of texts and tokens, answers, choices."""

from .architecture import Architecture, family
from .inputs import answer, choice, first_and_second, text_class, token_classes

__all__ = ["HEADS"]

HEADS: list[Architecture] = [
    *family(
        "heads",
        text_class,
        [
            "BartForSequenceClassification",
            "BertForSequenceClassification",
            "CanineForSequenceClassification",
            "DebertaV2ForSequenceClassification",
            "DistilBertForSequenceClassification",
            "GPT2ForSequenceClassification",
            "GPTNeoXForSequenceClassification",
            "LlamaForSequenceClassification",
            "LongformerForSequenceClassification",
            "MistralForSequenceClassification",
            "MixtralForSequenceClassification",
            "ModernBertForSequenceClassification",
            "Qwen3ForSequenceClassification",
            "XLNetForSequenceClassification",
        ],
    ),
    *family(
        "heads", text_class, {"T5ForSequenceClassification": {"decoder_start_token_id": 1, "classifier_dropout": 0.0}}
    ),
    *family(
        "heads",
        token_classes,
        [
            "BertForTokenClassification",
            "DebertaForTokenClassification",
            "ElectraForTokenClassification",
            "ErnieForTokenClassification",
            "RobertaForTokenClassification",
            "XLMRobertaForTokenClassification",
        ],
    ),
    *family("heads", token_classes, {"LlamaForTokenClassification": {"classifier_dropout": 0.0}}),
    *family(
        "heads",
        text_class,
        ["AlbertForSequenceClassification"],
        is_in_order=False,
        note="its one block is cut into layers, several of which use the same value",
    ),
    *family(
        "heads",
        answer,
        [
            "BertForQuestionAnswering",
            "BigBirdForQuestionAnswering",
            "FunnelForQuestionAnswering",
            "LlamaForQuestionAnswering",
            "RobertaForQuestionAnswering",
            "SplinterForQuestionAnswering",
            "XLMForQuestionAnsweringSimple",
        ],
    ),
    *family("heads", choice, ["BertForMultipleChoice", "RobertaForMultipleChoice"]),
    *family("heads", first_and_second, ["BertForPreTraining", "MegatronBertForPreTraining"]),
]
