"""A replayed update as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from lightning_rlhf.replay.replayed import (
    COLUMNS,
    ReplayedResponse,
    ReplayedToken,
    cells,
    heading,
    legend,
    order,
)
from lightning_rlhf.report.token_text import BLUE, GREEN, ORANGE, RED, colour, marked, scale

STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; }
details { overflow-x: auto; }
section { margin-top: 2.5rem; }
h2 { font-size: 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; margin: .5rem 0; }
.prompt { opacity: .7; }
.response { font-family: ui-monospace, monospace; line-height: 2; }
.response span { background: var(--advantage); border-radius: .2rem; padding: .15rem 0; }
.below { border-top: .15rem dotted; }
.clipped { text-decoration: underline wavy; }
#kl:checked ~ main .response span { background: var(--kl); border-top: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; }
td, th { padding: .1rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; font-family: ui-monospace, monospace; }
@media print {
  body { font-size: 9pt; max-width: none; margin: 0; padding: 0; }
  details:not([open])::details-content { content-visibility: visible; height: auto; }
  * { print-color-adjust: exact; }
}
"""


def replay_page(title: str, verdict: str, responses: Sequence[ReplayedResponse], batch: int) -> str:
    """Return the page as HTML; texts are escaped, and a policy forbids browsers to load anything.

    batch: number of responses of the iteration.
    """
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>"
        for name, meaning in legend(responses).items()
    )
    sections = "".join(_section(responses))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="lightning-rlhf">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(verdict)}</p>
<p>Colour of a token, stronger where the number is larger:</p>
<input type="radio" name="colour" id="advantage" checked>
<label for="advantage">advantage: {_patch(GREEN)} above 0,
{_patch(RED, "below")} below, with a dotted line over it</label><br>
<input type="radio" name="colour" id="kl">
<label for="kl">KL to the reference, after less before: {_patch(ORANGE)} rose,
{_patch(BLUE)} fell</label>
<p>A wavy line under a token: clipped. The numbers of a token are shown where the pointer rests on
it.</p>
<dl>{terms}</dl>
<p>Shown: {escape(order(len(responses), batch))}.</p>
<main>{sections}</main>
</body>
</html>
"""


def _section(responses: Sequence[ReplayedResponse]) -> Iterator[str]:
    tokens = [token for response in responses for token in response.tokens]
    advantage = scale([token.advantage for token in tokens])
    kl = scale([token.kl_after - token.kl for token in tokens])
    for response in responses:
        text = "".join(_span(token, advantage, kl) for token in response.tokens)
        yield (
            f"<section><h2>{escape(heading(response))}</h2>"
            f'<pre class="prompt">{escape(marked(response.prompt))}</pre>'
            f'<pre class="response">{text}</pre>'
            f"<details><summary>numbers</summary>{_table(response)}</details></section>\n"
        )


def _span(token: ReplayedToken, advantage: float, kl: float) -> str:
    shown = cells(token)
    title = "\n".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, shown, strict=False) if cell)
    colours = (
        f"--advantage: {colour(token.advantage / advantage, GREEN, RED)}; "
        f"--kl: {colour((token.kl_after - token.kl) / kl, ORANGE, BLUE)}"
    )
    marks = ["below"] * (token.advantage < 0) + ["clipped"] * token.clipped
    kind = f' class="{" ".join(marks)}"' if marks else ""
    text = escape(marked(token.text))
    return f'<span{kind} style="{colours}" title="{escape(title)}">{text}</span>'


def _table(response: ReplayedResponse) -> str:
    shown = [cells(token) for token in response.tokens]
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS[: len(shown[0])])
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in shown
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _patch(colour: str, mark: str = "") -> str:
    return f'<span class="{mark}" style="background: rgb({colour} / .55)">&emsp;</span>'
