"""Reports of a run as HTML pages for a browser: figures from the ledger, charts as SVG, no external
files.
"""
