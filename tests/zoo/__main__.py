"""`python -m tests.zoo`: run the zoo and print the score; `make zoo`."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.scoring import HALVES, Result, judged, scripts_of


def main() -> int:
    """Print a row a script and the score of each half."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo",
        description="Run sick and healthy scripts under `gradscale run`, and score the "
        "first finding of `gradscale doctor`: cause, location, false alarms.",
    )
    parser.add_argument("half", nargs="*", default=HALVES, help="open or kept")
    parser.add_argument("--only", action="append", help="run this script only")
    parser.add_argument("--wrong", action="store_true", help="print wrong ones only")
    parser.add_argument("--score", action="store_true", help="print the score only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--keep", help="keep the run files in this folder")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.keep or temporary).absolute()
        folder.mkdir(exist_ok=True)
        for half in args.half:
            scripts = [
                each
                for each in scripts_of(half)
                if args.only is None or each.name in args.only
            ]
            if not scripts:
                print(f"{half}: no scripts")
                continue
            results = []
            for result in judged(scripts, folder, at_once=2):
                results.append(result)
                if not (args.json or args.score) and (
                    not args.wrong or is_wrong(result)
                ):
                    print(line_of(result), flush=True)
            failed = failed or any(map(is_wrong, results))
            score = score_of(results)
            print(json.dumps({half: score}) if args.json else f"{half}: {words(score)}")
    return int(failed)


def is_wrong(result: Result) -> bool:
    """Return whether cause or location is wrong, or the script did not end well."""
    return not result.right_cause or result.right_place is False or result.ended != 0


def line_of(result: Result) -> str:
    """Return a row for a script."""
    mark = "  " if not is_wrong(result) else "! "
    script, first = result.script, result.first
    wanted = f"{script.cause} {'|'.join(script.places)}" if script.sick else "healthy"
    got = f"{first.get('code')} {first.get('cause')} at {first.get('where')!r}"
    got = got if first else result.verdict
    ended = f" exit {result.ended}" if result.ended else ""
    return f"{mark}{script!s:45} {wanted:40} -> {got}{ended}"


def score_of(results: Sequence[Result]) -> dict[str, int]:
    """Return the counts of right and wrong diagnoses."""
    sick = [result for result in results if result.script.sick]
    healthy = [result for result in results if not result.script.sick]
    placed = [result for result in sick if result.right_place is not None]
    return {
        "sick": len(sick),
        "right_cause": sum(result.right_cause for result in sick),
        "with_place": len(placed),
        "right_place": sum(result.right_place is True for result in placed),
        "healthy": len(healthy),
        "false_alarms": sum(bool(result.findings) for result in healthy),
        "broken": sum(result.ended != 0 for result in results),
    }


def words(score: dict[str, int]) -> str:
    """Return the score in a line."""
    return (
        f"cause {score['right_cause']} of {score['sick']}, "
        f"location {score['right_place']} of {score['with_place']}, "
        f"false alarms {score['false_alarms']} of {score['healthy']} healthy, "
        f"{score['broken']} scripts ended with an error"
    )


if __name__ == "__main__":
    sys.exit(main())
