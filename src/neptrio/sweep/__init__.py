"""`neptrio explain MODEL --plot`: a short measurement of a running model, drawn, and what it recommends."""
