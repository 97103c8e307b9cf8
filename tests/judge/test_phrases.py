"""Evidence is printed in words, and none of it is left out."""

import pytest

from gradscale.judge.phrases import in_words


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (
            {"loss": "nan", "finite_before": True},
            "the loss was NaN, finite before",
        ),
        (
            {"loss": "inf", "recovered": True, "finite_before": True},
            "the loss was infinite, finite before and after",
        ),
        (
            {"loss": "inf", "recovered": True, "finite_before": False},
            "the loss was infinite, finite after",
        ),
        (
            {"loss": "not finite", "finite_before": False},
            "the loss was not finite, no step was taken before",
        ),
        (
            {"value": 3.5, "fits": "2^14", "scale": "2^16", "times": 4},
            "the loss was 3.5; 4 times; S = 2^16; in float16 it fits up to S = 2^14",
        ),
        ({"steps": 8, "applied": 6}, "6 of 8 steps applied; 8 of 8 steps lost"),
        ({"applied": 0, "times": 1}, ""),
        ({"steps": 20, "of": 60}, "20 of 60 steps lost"),
        ({"growths": 5}, "5 right after a growth"),
        ({"growths": 0}, ""),
        (
            {"weight_from": 0.5, "weight_to": 1234.0, "rate": 0.1},
            "largest weight 0.5 at first and 1.23e+03 now; learning rate 0.1",
        ),
        ({"buffers": "bn.running_var"}, "the buffer bn.running_var is not finite"),
        ({"uncleared": True}, "gradients are not cleared"),
        ({"float16_params": 3, "direct_steps": 0}, "3 float16 weights"),
        (
            {"nan": True, "loss_finite": True},
            "NaN gradients; the loss was finite",
        ),
        (
            {"nan": False, "loss_finite": False},
            "infinite gradients, no NaN; the loss was not finite",
        ),
        ({"scale_from": "2^14", "scale": "2^7"}, "S went from 2^14 to 2^7"),
        ({"scale_from": "2^7", "scale": "2^7", "fallen": False}, "S = 2^7"),
        (
            {"scale_from": "2^16", "scale": "2^8", "bits": 8.0},
            "S fell by 8 bits from 2^16 to 2^8",
        ),
        (
            {"signal": "scale", "bits": 3.82, "usual_log2": 13.82, "now_log2": 10.0},
            "S is usually about 2^13.82 and is about 2^10 now",
        ),
        (
            {"signal": "headroom", "bits": 4.0, "usual_log2": -11.0, "now_log2": -7.0},
            "the largest gradient is usually about 2^-11 and is about 2^-7 now",
        ),
        ({"at_floor": True, "falling": True}, "S is at its floor; S is falling"),
        ({"at_floor": False, "falling": False}, "S is stable"),
        ({"floor_steps": 3}, "3 steps in a row at the floor"),
        (
            {"lost": 0.41, "amax": 0.02, "headroom_bits": 21.6, "room": "2^19"},
            "41% of the elements too small; largest scaled gradient 0.02; gradients 22 "
            "bits below 65504",
        ),
        (
            {"culprit": "a", "culprits": 3, "tensors": 5},
            "3 of 5 tensors not finite, first a",
        ),
        ({"culprit": "a", "culprits": 1}, "1 tensor not finite, first a"),
        (
            {"loss_low": 0.13, "loss_mean": 0.78, "loss_start": 1.43},
            "the loss had risen from 0.13 to 0.78, 1.43 at the start",
        ),
        ({"loss_low": 2.0, "loss_mean": 8.0}, "the loss had risen from 2 to 8"),
        (
            {"loss_start": 8.64, "loss_last": 1625.0},
            "the loss had risen from 8.64 to 1625",
        ),
        (
            {"gradients_grown_bits": 2.44, "usual_before": 87},
            "gradients had grown by 2.44 bits; usual values before step 87",
        ),
        ({"steps_before": 20}, "20 earlier steps"),
        ({"steps_before": 1}, "1 earlier step"),
        ({"gradients_before": True}, "there were gradients before"),
        ({"gradients_before": False}, "no gradients so far"),
        ({"mended": True}, "ten finite steps in a row followed"),
        (
            {"place": "forward of pool", "place_step": 9, "place_kind": "nan"},
            "observed in step 9: forward of pool",
        ),
        ({"times": 3, "first_step": 4, "last_step": 90}, ""),
        ({"since": 4}, ""),
        ({"not_known": True, "other": 1.23456}, "not known yes; other 1.235"),
    ],
)
def test_evidence_is_printed_in_words(evidence, words):
    assert in_words(evidence) == words
