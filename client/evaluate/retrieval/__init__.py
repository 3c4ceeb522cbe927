"""Whether a model still finds what a long prompt said: RULER's thirteen kinds of tasks, all made here."""
