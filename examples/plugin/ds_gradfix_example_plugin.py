"""A patch of a plug-in: DeepSpeed's `engine.get_batch_info()` gives functions where it says that it gives numbers."""

from ds_gradfix.registry import Effect, Measurement, Patch, Replace, Target, Verdict

GET_BATCH_INFO = Target("deepspeed.runtime.engine", "DeepSpeedEngine.get_batch_info")


def call_them(engagement, original, engine):
    """What takes the place of the installed function on an engine that the patch is in force for."""
    return tuple(number() if callable(number) else number for number in original(engine))


def affects(facts):
    """What the defect does to a job with these facts; None where it does not bite. It bites everywhere."""
    return Effect(factor=None, words="get_batch_info() gives functions instead of numbers")


def measure(engine):
    """The self-check: what the engine gives as it stands, over what is right."""
    given = engine.get_batch_info()[0]
    ratio = float("nan") if callable(given) else given / engine.train_batch_size()
    return [Measurement("train_batch_size of get_batch_info()", ratio, error=abs(ratio - 1), tolerance=0.0)]


PATCH = Patch(
    id="batch-info",
    title="get_batch_info() gives functions",
    symptom="Arithmetic with what engine.get_batch_info() returns raises TypeError.",
    cause="It returns three methods of the engine without calling them.",
    fix="Call them.",
    upstream=(),
    retire="When the installed function calls them: its fingerprint is another one then.",
    corrections=(Replace(GET_BATCH_INFO, call_them),),
    affects=affects,
    measure=measure,
    # The same source in every release from 0.14.5 to 0.19.8. `ds-gradfix list` prints that of an installed function.
    fingerprints={str(GET_BATCH_INFO): {"95b441e7e2e74044": Verdict.DEFECTIVE}},
)
