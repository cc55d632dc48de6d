"""Reports of a run as HTML pages: figures from the ledger, charts as SVG, no external files."""
