# Completes commands, options and values in fish; written by `agentgym completion fish`.
function __agentgym_words
    switch "$argv[1]"
        case "@KEY@"; echo "@WORDS@"
    end
end
function __agentgym
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l route agentgym
    for word in $words
        set -l key "$route $word"
        set -l candidates (__agentgym_words "$key -")
        if not string match -q -- "-*" "$word"; and test -n "$candidates"
            set route $key
        end
    end
    set -l key $route
    if string match -q -- "-*" "$current"
        set key "$route -"
    else if string match -q -- "-*" "$words[-1]"
        set key "$route $words[-1]"
    end
    set -l candidates (__agentgym_words "$key" | string split " ")
    if test -n "$candidates"
        printf "%s\n" $candidates
    else
        __fish_complete_path "$current"
    end
end
complete -c agentgym -f -a "(__agentgym)"
