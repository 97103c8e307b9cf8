"""The scale at each step, and the phases of a run."""

from gradscale.core.records import Verdict
from gradscale.diagnosis.timeline import Timeline, phases_of

OK, SKIP, LOSS = Verdict.OK, Verdict.OVERFLOW, Verdict.FORWARD_NONFINITE


def timeline_of(*steps):
    """Return the timeline of (log2 of the scale, verdict), from step 1 on."""
    timeline = Timeline()
    for step, (log2, verdict) in enumerate(steps, start=1):
        timeline.note(step, 2.0**log2, verdict)
    return timeline


def named(timeline):
    return [(phase.name, phase.first, phase.last) for phase in phases_of(timeline)]


def test_the_scale_at_a_step_is_that_of_the_last_change():
    timeline = timeline_of((4, OK), (4, OK), (5, OK), (5, OK), (3, OK))
    assert [timeline.at(step) for step in range(1, 6)] == [4, 4, 5, 5, 3]


def test_only_changes_are_kept():
    timeline = timeline_of((4, OK), (4, OK), (5, OK), (5, OK))
    assert list(timeline.changes()) == [(1, 4.0), (3, 5.0)]


def test_pieces_have_the_lowest_and_highest_scale_of_their_steps():
    timeline = timeline_of((4, OK), (9, OK), (5, OK), (5, OK), (3, OK), (3, OK))
    assert timeline.columns(3) == [(4.0, 9.0), (5.0, 5.0), (3.0, 3.0)]


def test_more_pieces_than_steps_repeat_them():
    assert timeline_of((4, OK), (5, OK)).columns(4) == [(4, 4), (4, 4), (5, 5), (5, 5)]


def test_marks_have_the_scale_of_their_step():
    timeline = timeline_of((4, OK), (4, SKIP), (3, OK))
    [mark] = timeline.marks()
    assert (mark.step, mark.log2, mark.verdict) == (2, 4.0, SKIP)
    assert timeline.last_mark() == mark


def test_underflow_and_idle_steps_are_no_skips():
    idle, lost = Verdict.NO_GRADIENTS, Verdict.UNDERFLOW
    assert timeline_of((4, idle), (4, lost), (4, SKIP)).skips(1, 3) == 1


def test_a_step_that_was_taken_is_no_skip_whatever_its_verdict():
    timeline = Timeline()
    for step, skipped in enumerate((False, True, False), start=1):
        timeline.note(step, 4.0, LOSS, skipped)
    assert (timeline.skips(1, 3), timeline.skips(1, 1)) == (1, 0)


def test_a_run_without_trouble_is_one_phase():
    steps = [(4, OK)] * 20 + [(4, SKIP)] + [(3, OK)] * 20
    assert named(timeline_of(*steps)) == [("steady", 1, 41)]


def test_trouble_is_a_phase_between_two_steady_ones():
    steps = [(4, OK)] * 20 + [(4, LOSS)] * 5 + [(4, OK)] * 20
    assert named(timeline_of(*steps)) == [
        ("steady", 1, 20),
        ("forward_nonfinite", 21, 25),
        ("steady", 26, 45),
    ]


def test_a_scale_that_falls_is_not_steady():
    steps = [(14, OK)] * 20
    for log2 in (14, 13, 12, 11, 10):
        steps += [(log2, SKIP)] + [(log2 - 1, OK)] * 5
    steps += [(9, OK)] * 20
    steady, falling, after = phases_of(timeline_of(*steps))
    assert (steady.name, steady.last) == ("steady", 20)
    assert (falling.name, falling.first, falling.last) == ("falling", 21, 46)
    assert (falling.skipped, falling.scale_from, falling.scale_to) == (5, 2**14, 2**9)
    assert (after.name, after.scale_from) == ("steady", 2**9)


def test_swings_of_three_bits_are_steady():
    steps = ([(14, OK)] * 5 + [(13, OK)] * 5 + [(11, OK)] * 5) * 3
    assert named(timeline_of(*steps)) == [("steady", 1, 45)]


def test_a_fall_is_over_once_the_scale_has_risen_again():
    fall = [(14, OK)] * 5 + [(12, OK)] * 5 + [(10, OK)] * 5
    steps = fall + [(11, OK)] * 5 + [(12, OK)] * 5 + [(14, OK)] * 5
    assert named(timeline_of(*steps)) == [
        ("steady", 1, 4),
        ("falling", 5, 11),
        ("steady", 12, 30),
    ]


def test_one_raise_on_the_way_down_does_not_end_a_fall():
    steps = [(14, OK)] * 5 + [(10, OK)] * 5 + [(11, OK)] * 5 + [(7, OK)] * 5
    assert named(timeline_of(*steps)) == [
        ("steady", 1, 4),
        ("falling", 5, 16),
        ("steady", 17, 20),
    ]


def test_each_fall_is_a_phase():
    fall = [(14, OK)] * 5 + [(10, OK)] * 5
    names = [name for name, _, _ in named(timeline_of(*fall, *fall))]
    assert names == ["steady", "falling", "steady", "falling", "steady"]


def test_a_fall_within_trouble_belongs_to_it():
    steps = [(14, OK)] * 5 + [(14 - n, LOSS) for n in range(8)]
    assert named(timeline_of(*steps)) == [
        ("steady", 1, 5),
        ("forward_nonfinite", 6, 13),
    ]


def test_samples_that_lose_too_much_are_one_phase():
    lost = {1, 2, 4, 8, 16, 32, 64, 100, 200, 300}
    steps = [(0, Verdict.UNDERFLOW if n in lost else OK) for n in range(1, 351)]
    assert named(timeline_of(*steps)) == [("underflow", 1, 300), ("steady", 301, 350)]


def test_two_bad_steps_are_no_phase():
    steps = [(4, OK)] * 20 + [(4, LOSS)] * 2 + [(4, OK)] * 20
    assert named(timeline_of(*steps)) == [("steady", 1, 42)]


def test_one_step_of_calibration_is_a_phase():
    steps = [(4, Verdict.CALIBRATING)] + [(3, OK)] * 20
    assert named(timeline_of(*steps)) == [("calibrating", 1, 1), ("steady", 2, 21)]


def test_calibration_begins_with_the_run():
    steps = [(4, OK)] * 3 + [(4, Verdict.CALIBRATING)] + [(3, OK)] * 20
    assert named(timeline_of(*steps)) == [("calibrating", 1, 4), ("steady", 5, 24)]


def test_one_step_of_collapse_is_a_phase():
    steps = [(4, LOSS)] * 5 + [(4, Verdict.COLLAPSE)]
    assert named(timeline_of(*steps)) == [
        ("forward_nonfinite", 1, 5),
        ("collapse", 6, 6),
    ]


def test_a_few_good_steps_do_not_end_a_phase():
    steps = [(4, LOSS)] * 3 + [(4, OK)] * 9 + [(4, LOSS)] * 3 + [(4, OK)] * 5
    assert named(timeline_of(*steps)) == [
        ("forward_nonfinite", 1, 15),
        ("steady", 16, 20),
    ]


def test_ten_good_steps_end_a_phase():
    steps = [(4, LOSS)] * 3 + [(4, OK)] * 10 + [(4, LOSS)] * 3
    names = [name for name, _, _ in named(timeline_of(*steps))]
    assert names == ["forward_nonfinite", "steady", "forward_nonfinite"]


def test_skips_that_lead_up_to_trouble_belong_to_it():
    steps = [(9, OK)] * 5 + [(9 - n, SKIP) for n in range(4)]
    steps += [(5 - n, Verdict.GENUINE) for n in range(4)]
    [_, phase] = phases_of(timeline_of(*steps))
    assert (phase.first, phase.skipped) == (6, 8)
    assert (phase.scale_from, phase.scale_to) == (2.0**9, 2.0**2)


def test_phases_that_follow_at_once_do_not_overlap():
    steps = [(4, Verdict.GENUINE)] * 5 + [(4, Verdict.COLLAPSE)] * 5
    assert named(timeline_of(*steps)) == [("genuine", 1, 5), ("collapse", 6, 10)]
