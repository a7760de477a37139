"""The verbs, a module each, named like the verb.

The rule of this package: a verb reads like a runbook, its steps below it in the order of their call. It calls the
controller and shows the response; it decides nothing and writes nothing itself. Data goes to stdout, talk to
stderr. What a user can fix is raised as an error with a sentence, and turned into an exit code in `app.py`
alone. A module imports what its own verb needs: the others are not loaded with it.

Beside the verbs: `options` (the flags several verbs share), `files` (from a service file and flags to a spec),
`prices` (the plan as a table, and the question), `progress` (follows the event log until a condition holds).
"""
