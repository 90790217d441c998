"""Evaluation: the quality of a model, and the distance of a compressed model from its dense original.

`likelihood` measures perplexity, `divergence` compares predictions of tokens, `answers` those of answers, `drift`
outputs of encoders, and `harness` runs zero-shot tasks. `comparison` measures a dense and a compressed model one after
the other, and `text` evaluates a folder on a file.
"""

from rocket_core.evaluation.answers import Prompt, greedy_answer, read_prompts
from rocket_core.evaluation.comparison import Comparison, EvaluationText, Measurement, compare_models
from rocket_core.evaluation.divergence import DivergenceSum, token_divergence
from rocket_core.evaluation.drift import masked_mean, mean_cosine_drift, pooled_outputs, sentences
from rocket_core.evaluation.harness import Task, load_tasks, score_tasks
from rocket_core.evaluation.likelihood import PerplexityResult, perplexity
from rocket_core.evaluation.models import ModelFolder, check_package, load_model, open_gguf, open_model
from rocket_core.evaluation.text import EvaluationResult, evaluate_text, read_text
from rocket_core.evaluation.windows import text_windows

__all__ = [
    "Comparison",
    "DivergenceSum",
    "EvaluationResult",
    "EvaluationText",
    "Measurement",
    "ModelFolder",
    "PerplexityResult",
    "Prompt",
    "Task",
    "check_package",
    "compare_models",
    "evaluate_text",
    "greedy_answer",
    "load_model",
    "load_tasks",
    "masked_mean",
    "mean_cosine_drift",
    "open_gguf",
    "open_model",
    "perplexity",
    "pooled_outputs",
    "read_prompts",
    "read_text",
    "score_tasks",
    "sentences",
    "text_windows",
    "token_divergence",
]
