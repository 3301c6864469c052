"""The oracle: what DeepSpeed computes, stock or corrected, against the same training in float64 without DeepSpeed.

    from ds_gradfix.verify import Case, measure
    (result,) = measure([Case({"zero_optimization": {"stage": 3}}, sequence_parallel=2)], ranks=2, corrected=False)
    result.ratios, result.gradient.words, result.right

Importing this package imports neither torch nor DeepSpeed; `measure` imports torch, and its rank processes DeepSpeed.
"""

from ds_gradfix.verify.cases import Case, Model
from ds_gradfix.verify.launch import RankFailure
from ds_gradfix.verify.oracle import measure

__all__ = ["Case", "Model", "RankFailure", "measure"]
