"""Evaluation: the quality of a model, and the distance of a compressed model from its dense original.

`likelihood` measures perplexity, `divergence` compares predictions of tokens, `answers` those of answers, `drift`
outputs of encoders, and `harness` runs zero-shot tasks. `comparison` measures a dense and a compressed model one after
the other, and `text` evaluates a folder on a file.
"""

from rocket_core.evaluation.answers import Prompt, read_prompts
from rocket_core.evaluation.comparison import EvaluationText, Measurement, compare_models
from rocket_core.evaluation.drift import mean_cosine_drift, pooled_outputs
from rocket_core.evaluation.harness import Task, load_tasks
from rocket_core.evaluation.likelihood import perplexity
from rocket_core.evaluation.models import ModelFolder, check_package, load_model, open_gguf, open_model
from rocket_core.evaluation.text import EvaluationResult, evaluate_text, read_text

__all__ = [
    "EvaluationResult",
    "EvaluationText",
    "Measurement",
    "ModelFolder",
    "Prompt",
    "Task",
    "check_package",
    "compare_models",
    "evaluate_text",
    "load_model",
    "load_tasks",
    "mean_cosine_drift",
    "open_gguf",
    "open_model",
    "perplexity",
    "pooled_outputs",
    "read_prompts",
    "read_text",
]
