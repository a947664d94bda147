"""One file per command, each with a `COMMAND`: its flags and what it does. They import little, so
that help is quick."""
