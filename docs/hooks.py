"""What mkdocs does beside its plugins: references of docstrings in Sphinx's notation are shown as code."""

import re

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: object) -> str:
    """Show ``:class:`Name``` as code."""
    return _ROLE.sub(r"<code>\1</code>", html)
