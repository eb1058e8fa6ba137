"""From ids to tokens: tables, sharded or local, and tables that manage their rows."""
