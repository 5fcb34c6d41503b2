"""How this project's pages in the Airflow UI look."""

from html import escape

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 1.5rem; color: #1f2430; background: #fff; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
table { border-collapse: collapse; } table.wide { width: 100%; }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid #e3e6ec; vertical-align: top; }
th { color: #667; font-weight: 500; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.failed, .fenced { color: #b3261e; } .done { color: #1b7f3b; } .dim { color: #778; }
.bar { display: inline-block; height: .7rem; background: #5b8def; }
pre { overflow: auto; max-height: 30rem; padding: .8rem; background: #f4f5f8; font-size: 12px; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e6eb; background: #16181d; } th, td { border-color: #30343d; } pre { background: #22252c; }
}
"""


def document(title: str, body: str) -> str:
    """A whole page; `body` is HTML already."""
    return f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>{body}"


def said(error: Exception) -> str:
    """An error for whoever looks at the page."""
    return f"<pre class=failed>{escape(str(error))}</pre>"
