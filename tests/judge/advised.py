"""Evidence as findings have it, and the advice that follows from it."""

from gradscale.judge.advice import advice_for

BACKWARD = {"since": 90, "loss_finite": True, "nan": True, "scale": "2^8"}
SKIPS = {
    "since": 90,
    "steps": 20,
    "of": 60,
    "scale": "2^15",
    "at_floor": False,
    "falling": False,
}
LOSS = {
    "since": 90,
    "loss": "nan",
    "steps": 10,
    "applied": 0,
    "times": 1,
    "over": False,
    "finite_before": True,
    "scale_from": "2^16",
    "scale": "2^16",
}
ROSE = {"loss_low": 2.0, "loss_mean": 8.0, "loss_start": 3.0, "usual_before": 80}
SOARED = {"loss_start": 8.0, "loss_last": 6795.0}
GREW = {"gradients_grown_bits": 5.0, "usual_before": 80}
NAMED = {"culprit": "decoder.3.wo.weight", "culprits": 1}
PLACE = {
    "place": "forward of pool (Pool), output: 512 of 512 NaN",
    "place_step": 95,
    "place_at": "module pool",
    "place_module": "pool",
    "place_direction": "forward",
    "place_operation": "",
    "place_tensor": "output",
    "place_kind": "nan",
    "place_instead": "",
}


def said(code, *parts):
    evidence = {name: value for part in parts for name, value in part.items()}
    return " ".join(advice_for(code, evidence))
