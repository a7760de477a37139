"""Commands and shells of users where replicas run."""
