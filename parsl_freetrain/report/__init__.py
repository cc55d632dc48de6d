"""What a run came to, as pages for a browser: figures from the ledger, pictures as SVG, HTML without anything from elsewhere."""
