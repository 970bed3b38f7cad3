# Completes commands, options and values in bash; written by `agentgym completion bash`.
_agentgym_words() {
  case "$1" in
    "@KEY@") echo "@WORDS@" ;;
  esac
}
_agentgym() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" route=agentgym key index
  for ((index = 1; index < COMP_CWORD; index++)); do
    key="$route ${COMP_WORDS[index]}"
    [[ "${COMP_WORDS[index]}" != -* && -n "$(_agentgym_words "$key -")" ]] || break
    route="$key"
  done
  if [[ "$current" == "=" ]]; then current=""; fi
  if [[ "$previous" == "=" ]]; then previous="${COMP_WORDS[COMP_CWORD - 2]}"; fi
  key="$route"
  if [[ "$current" == -* ]]; then key="$route -"; elif [[ "$previous" == -* ]]; then key="$route $previous"; fi
  COMPREPLY=($(compgen -W "$(_agentgym_words "$key")" -- "$current"))
}
complete -o bashdefault -o default -F _agentgym agentgym
