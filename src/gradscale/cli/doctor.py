"""`gradscale doctor`: diagnose a run."""

import typer
from rich.console import Group

from gradscale.cli._output import AsJson, print_json, show
from gradscale.cli._run_files import File, opened, reading_progress
from gradscale.diagnosis import diagnose_run
from gradscale.report.run_screen import findings, headline


def doctor(file: File, as_json: AsJson = False) -> None:
    """Diagnose a run: print its verdict, the findings and advice.

    - `gradscale doctor run.gs` – print the verdict and the findings
    - `gradscale doctor run.gs --json` – print `{"verdict": …, "findings": [{"code",
      "cause", "where", "step", "since", "what", "cost", "evidence", "advice"}, …],
      "not_judged": […]}`, the most severe first
    - `gradscale doctor run.gs && ./submit.sh` – continue only if the run is healthy

    | exit code | verdict | |
    |---|---|---|
    | 0 | healthy | no problems |
    | 1 | findings | problems that need attention |
    | 2 | collapse | no scale can help |
    | 3 | | the file cannot be read |
    """
    with opened(file) as (run,), reading_progress(run) as on_steps:
        diagnosis = diagnose_run(run, on_steps=on_steps)
    if as_json:
        print_json(diagnosis.verdict_as_dict())
    else:
        show(Group(headline(diagnosis), "", *findings(diagnosis)))
    raise typer.Exit(diagnosis.health.exit_code)
