"""Late rows judged and recorded, for a scaler that is only watched."""

import math
from collections import deque
from collections.abc import Callable, Mapping

from gradscale.judge.judge import Judge
from gradscale.recording.recorder import Recorder
from gradscale.torch.device_state.host_copy import LAG, LateRow
from gradscale.torch.device_state.layout import record_of
from gradscale.torch.underflow.sample import UnderflowSample

# Peaks of one step, by name. Called only if something happened; may sync.
Peaks = Callable[[], Mapping[str, float]]


class Chronicle:
    """Judges late rows in order and hands them to a recorder. Prints nothing.

    Args:
        recorder: Where they go.
        judge: Who judges them.
    """

    def __init__(self, recorder: Recorder, judge: Judge | None = None) -> None:
        self.recorder = recorder
        self._judge = Judge() if judge is None else judge
        # The newest is of this update, the oldest of the update now due.
        self._peaks: deque[Peaks | None] = deque(maxlen=LAG + 1)

    def see(
        self,
        late: list[LateRow] | None,
        peaks: Peaks | None = None,
        sample: UnderflowSample | None = None,
    ) -> None:
        """See what an exchange of the mailbox returned. Call it once an exchange.

        Args:
            late: The rows now due, of the update `LAG` calls ago.
            peaks: Returns those of the update that was just made.
            sample: What the meter counted in the update `LAG` calls ago.
        """
        self._peaks.append(peaks)
        if not late:
            return
        for one in late[:-1]:
            self._see(one, None, None)
        own = self._peaks[0] if len(self._peaks) > LAG else None
        self._see(late[-1], own, sample)

    def _see(
        self, late: LateRow, peaks: Peaks | None, sample: UnderflowSample | None
    ) -> None:
        record = record_of(late.row, late.step, late.loss)
        if sample is not None:
            record = record._replace(lost=sample.lost)
        well = record.finite and record.norm_finite and record.read
        seen = {} if well or peaks is None else peaks()
        culprits = [name for name, peak in seen.items() if not math.isfinite(peak)]
        # A peak is NaN if there is one, and infinite only if there is none.
        nan = any(math.isnan(peak) for peak in seen.values())
        record = record._replace(nan=nan) if nan else record
        judgement = self._judge.see(record, culprits)
        self.recorder.see(record, judgement, culprits, seen)
        if sample is not None:
            self.recorder.sample(record.step, sample.rows())
