"""One module per command. They import nothing heavy at the top: ``harts --help`` stays fast."""
